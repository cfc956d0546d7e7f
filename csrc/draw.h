// One draw from one row of logits: stages on candidates. Internal to sampling.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "sampling.h"

namespace octavo {

struct Candidate {
    int32_t id;
    float z;       // logit after temperature, the likeliest at 0
    float weight;  // exp(z)
};

// Likelier first, ties to the lowest id.
inline bool likelier(const Candidate& a, const Candidate& b) { return a.z != b.z ? a.z > b.z : a.id < b.id; }

// Room for one thread's rows.
struct DrawScratch {
    explicit DrawScratch(int vocab_size);

    std::vector<float> adjusted, z, weights, block_sums, block_max, order;
    std::vector<int32_t> counts;  // all zero between draws
    std::vector<int32_t> matches;
    std::vector<Candidate> candidates;
};

// The uniform number of core/request.py: uniform().
double uniform(uint64_t stream, int64_t position, uint64_t purpose);

// Adds bias, masks and penalties to a copy of the row; returns the row itself if there is nothing to do.
// mask: a bit for each token that may be drawn, or null for all.
const float* adjust(const float* logits, int n, const DrawParams& draw, const DrawLists& lists, const uint32_t* mask,
                    DrawScratch& scratch);

// The token drawn for `position` from an adjusted row whose largest value is `largest` at `best`; kNoTokenLeft if
// everything is masked.
int32_t choose(const Kernels& kernels, const float* x, int n, int best, float largest, const DrawParams& draw,
               int64_t position, DrawScratch& scratch);

// The k likeliest of a row by (value, lowest id), likeliest first.
void select_top(const Kernels& kernels, const float* x, int n, int k, DrawScratch& scratch,
                std::vector<Candidate>& out);

// log of the sum of exp(x - shift), float64 over blocks.
double log_sum_exp(const Kernels& kernels, const float* x, int n, float shift, DrawScratch& scratch);

}  // namespace octavo
