// The paged KV cache: [block][layer][KV head][K, then V].
//
// K of a head and block is [head_dim][block_size]: a vector of K holds 16 positions of one dimension.
// V of a head and block is [block_size][head_dim padded to 16].
// All layers of a block lie together, so that copying a block is one copy, and memory grows with the blocks in use.
#pragma once

#include <cstddef>
#include <cstdint>

#include "memory.h"

namespace octavo {

enum class KvKind { kF32, kBf16 };

struct KvShape {
    int num_layers, num_blocks, block_size, num_kv_heads, head_dim;
    KvKind kind;

    bool bf16() const { return kind == KvKind::kBf16; }
    int v_dim() const { return (head_dim + 15) / 16 * 16; }
    size_t element_bytes() const { return bf16() ? 2 : 4; }
    size_t k_elements() const { return static_cast<size_t>(block_size) * head_dim; }
    size_t head_elements() const { return k_elements() + static_cast<size_t>(block_size) * v_dim(); }
    size_t layer_elements() const { return head_elements() * num_kv_heads; }
    size_t block_bytes() const { return layer_elements() * num_layers * element_bytes(); }
};

class KvCache {
  public:
    explicit KvCache(const KvShape& shape)
        : shape_(shape), pages_(shape.block_bytes() * static_cast<size_t>(shape.num_blocks)) {}

    const KvShape& shape() const { return shape_; }
    size_t bytes() const { return pages_.bytes(); }
    uint8_t* block(int block) const { return pages_.data() + static_cast<size_t>(block) * shape_.block_bytes(); }
    // K of head 0 of a layer in a block.
    uint8_t* layer(int block_id, int layer) const {
        return block(block_id) + static_cast<size_t>(layer) * shape_.layer_elements() * shape_.element_bytes();
    }

  private:
    KvShape shape_;
    PageBuffer pages_;
};

}  // namespace octavo
