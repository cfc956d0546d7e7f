// One step as the engine hands it over, and the check that nothing in it can lead a kernel out of bounds.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kv_cache.h"

namespace octavo {

// Mirrors kernels/base.py: ModelInput.
struct Step {
    // Parts of `ints`, which must stay alive, in its order. Throws std::invalid_argument if they do not make it up.
    Step(std::span<const int32_t> ints, size_t num_tokens, size_t num_rows, size_t num_seqs, size_t num_copies,
         size_t num_groups);

    std::span<const int32_t> token_ids;     // [T]
    std::span<const int32_t> positions;     // [T]
    std::span<const int32_t> slot_mapping;  // [G, T]
    std::span<const int32_t> logit_rows;    // [R]
    std::span<const int32_t> query_starts;  // [S + 1]
    std::span<const int32_t> context_lens;  // [S]
    std::span<const int32_t> copies;        // [C, 4]
    std::span<const int32_t> block_tables;  // [G, S, table_width]
    int table_width;

    int slot(int group, int token) const { return slot_mapping[at(group, token_ids.size(), token)]; }
    const int32_t* table(int group, int seq) const {
        return block_tables.data() + at(group, context_lens.size(), seq) * static_cast<size_t>(table_width);
    }

    int num_tokens() const { return static_cast<int>(token_ids.size()); }
    int num_rows() const { return static_cast<int>(logit_rows.size()); }
    int num_seqs() const { return static_cast<int>(context_lens.size()); }

  private:
    static size_t at(int row, size_t width, int column) {
        return static_cast<size_t>(row) * width + static_cast<size_t>(column);
    }
};

struct StepLimits {
    int max_tokens, max_seqs, vocab_size;
};

// Throws std::invalid_argument naming the array, the value and the limit.
void check_step(const Step& step, const StepLimits& limits, const KvCache& kv);

}  // namespace octavo
