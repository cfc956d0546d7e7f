// Scans over a row of logits. Include one of simd/*.h first.
#pragma once

#include "math.h"

namespace {

// Index of the largest value, the lowest one of equals; *finite: whether no value is NaN or infinite.
// Scans in pieces of 256: the value first, its place only in the piece that improved.
int argmax(const float* x, int n, float* best, bool* finite) {
    constexpr int kPiece = 256;
    const Vec lowest = set1(-__builtin_inff());
    float largest = -__builtin_inff();
    Vec poison = zero();  // x - x: 0, or NaN where x is not finite
    int piece = 0;
    for (int start = 0; start < n; start += kPiece) {
        const int end = start + kPiece < n ? start + kPiece : n;
        Vec top = lowest;
        int i = start;
        for (; i + kLanes <= end; i += kLanes) {
            const Vec v = load(x + i);
            poison = add(poison, sub(v, v));
            top = max(v, top);
        }
        if (i < end) {
            const Vec v = load_tail(x + i, end - i, x[i]);
            poison = add(poison, sub(v, v));
            top = max(v, top);
        }
        const float here = reduce_max(top);
        if (here > largest) {
            largest = here;
            piece = start;
        }
    }
    *best = largest;
    *finite = reduce_add(poison) == 0.0f;
    for (int i = piece; i < n; ++i)
        if (x[i] == largest) return i;
    return 0;
}

// Largest value of each block of 64.
void block_max(const float* x, int n, float* out) {
    for (int start = 0; start < n; start += octavo::kSumBlock, ++out) {
        const int end = start + octavo::kSumBlock < n ? start + octavo::kSumBlock : n;
        Vec top = set1(-__builtin_inff());
        int i = start;
        for (; i + kLanes <= end; i += kLanes) top = max(load(x + i), top);
        if (i < end) top = max(load_tail(x + i, end - i, -__builtin_inff()), top);
        *out = reduce_max(top);
    }
}

// z = (x - shift) / temperature, w = exp(z), and the sum of w over each block of 64 (few enough for float32).
void softmax_terms(const float* x, int n, float shift, float temperature, float* z, float* w, float* block_sums) {
    const Vec s = set1(shift), t = set1(temperature);
    for (int start = 0; start < n; start += octavo::kSumBlock, ++block_sums) {
        const int end = start + octavo::kSumBlock < n ? start + octavo::kSumBlock : n;
        Vec sum = zero();
        int i = start;
        for (; i + kLanes <= end; i += kLanes) {
            const Vec scaled = div(sub(load(x + i), s), t), e = exp(scaled);
            store(z + i, scaled);
            store(w + i, e);
            sum = add(sum, e);
        }
        if (i < end) {
            const Vec scaled = div(sub(load_tail(x + i, end - i, -__builtin_inff()), s), t), e = exp(scaled);
            store_tail(z + i, end - i, scaled);
            store_tail(w + i, end - i, e);
            sum = add(sum, e);
        }
        *block_sums = reduce_add(sum);
    }
}

}  // namespace
