// The paged KV cache. Each group of layers has its own pages: [block][layer of the group][KV head][K, then V].
//
// K of a head and block is [head_dim][block_size]: a vector of K holds 16 positions of one dimension.
// V of a head and block is [block_size][head_dim padded to 16].
// All layers of a group lie together in a block, so that copying a block is one copy, and memory grows with the blocks
// in use.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "memory.h"

namespace octavo {

enum class KvKind { kF32, kBf16 };

// What one layer keeps of one block of positions.
struct KvShape {
    int block_size, num_kv_heads, head_dim;
    KvKind kind;

    bool bf16() const { return kind == KvKind::kBf16; }
    int v_dim() const { return (head_dim + 15) / 16 * 16; }
    size_t element_bytes() const { return bf16() ? 2 : 4; }
    size_t k_elements() const { return static_cast<size_t>(block_size) * head_dim; }
    size_t head_elements() const { return k_elements() + static_cast<size_t>(block_size) * v_dim(); }
    size_t layer_bytes() const { return head_elements() * num_kv_heads * element_bytes(); }
};

// Layers that share block tables.
struct KvGroup {
    std::vector<int> layers;
    int num_blocks;
    int window;  // a query at p sees positions (p - window, p]; what lies before may be gone. 0: it sees all
};

class KvCache {
  public:
    // Throws std::invalid_argument unless the groups share out layers 0, 1, ... among them.
    KvCache(const KvShape& shape, std::vector<KvGroup> groups) : shape_(shape), groups_(std::move(groups)) {
        for (const KvGroup& group : groups_) {
            if (group.layers.empty() || group.num_blocks < 1 || group.window < 0)
                throw std::invalid_argument("a group of a KV cache has no layers or no blocks, or a negative window");
            places_.resize(places_.size() + group.layers.size(), {-1, 0});
        }
        for (int g = 0; g < num_groups(); ++g) {
            const KvGroup& group = groups_[static_cast<size_t>(g)];
            for (size_t i = 0; i < group.layers.size(); ++i) {
                const auto layer = static_cast<size_t>(group.layers[i]);
                if (group.layers[i] < 0 || layer >= places_.size() || places_[layer].group >= 0)
                    throw std::invalid_argument("layer " + std::to_string(group.layers[i]) +
                                                " of a KV cache is not one of its layers, or is in two groups");
                places_[layer] = {g, i * shape_.layer_bytes()};
            }
            pages_.emplace_back(block_bytes(g) * static_cast<size_t>(group.num_blocks));
        }
    }

    KvCache(const KvCache&) = delete;
    KvCache& operator=(const KvCache&) = delete;

    const KvShape& shape() const { return shape_; }
    int num_groups() const { return static_cast<int>(groups_.size()); }
    int num_layers() const { return static_cast<int>(places_.size()); }
    const KvGroup& group(int group) const { return groups_[static_cast<size_t>(group)]; }
    int group_of(int layer) const { return places_[static_cast<size_t>(layer)].group; }
    size_t block_bytes(int g) const { return group(g).layers.size() * shape_.layer_bytes(); }
    size_t bytes() const {
        size_t bytes = 0;
        for (const PageBuffer& pages : pages_) bytes += pages.bytes();
        return bytes;
    }
    uint8_t* block(int group, int block) const {
        return pages_[static_cast<size_t>(group)].data() + static_cast<size_t>(block) * block_bytes(group);
    }
    // K of head 0 of a layer in a block of its group.
    uint8_t* layer(int block_id, int layer) const {
        const Place& place = places_[static_cast<size_t>(layer)];
        return block(place.group, block_id) + place.offset;
    }

  private:
    struct Place {
        int group;
        size_t offset;  // in a block
    };

    KvShape shape_;
    std::vector<KvGroup> groups_;
    std::vector<Place> places_;  // of each layer
    std::vector<PageBuffer> pages_;
};

}  // namespace octavo
