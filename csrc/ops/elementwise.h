// Elementwise ops, row norms and the quantisation of activations. Include one of simd/*.h first.
#pragma once

#include "math.h"

namespace {

// One row of `width` floats padded with zeros to a multiple of 16:
// out = x / sqrt(mean(x^2) + eps) * weight. Squares are summed in 16 running sums (lane = index mod 16), then as a
// tree.
void rms_norm(const float* x, const float* weight, int width, float eps, float* out) {
    Vec squares = zero();
    for (int i = 0; i < width; i += kLanes) {
        const Vec v = load(x + i);
        squares = fma(v, v, squares);
    }
    const float mean = reduce_add(squares) / static_cast<float>(width);
    const Vec factor = div(set1(1.0f), sqrt(set1(mean + eps)));
    for (int i = 0; i < width; i += kLanes) store(out + i, mul(mul(load(x + i), factor), load(weight + i)));
}

// One row in groups of 32 with a scale each: x = scale * q, scale = max|x| / 127, q to nearest even.
// A group with NaN or infinity gets a scale that makes every product with it NaN or infinite.
void quantise(const float* x, int cols, const octavo::Quantised& to, size_t row, size_t column) {
    const size_t first = row * to.cols + column;
    int8_t* q = to.q + first;
    for (size_t g = first / octavo::kGroup; cols > 0; ++g, cols -= octavo::kGroup) {
        const Vec a = load(x), b = load(x + kLanes);
        const float largest = reduce_max_magnitude(max_magnitude(a, b));
        const float scale = largest * (1.0f / 127.0f);
        // below 2^-100 the reciprocal would overflow: such a group is zero
        const Vec inverse = set1(largest < 0x1p-100f ? 0.0f : 127.0f / largest);
        const IVec qa = round_to_int(mul(a, inverse)), qb = round_to_int(mul(b, inverse));
        store_i8(q, qa);
        store_i8(q + kLanes, qb);
        const int32_t total = reduce_iadd(iadd(qa, qb));
        to.scale[g] = scale;
        to.total[g] = total;
        if (to.low) to.low[g] = reduce_iadd(qa);
        to.sum[g] = scale * static_cast<float>(total);
        x += octavo::kGroup;
        q += octavo::kGroup;
    }
}

// Denormals as zeros, as the conversions of AVX512_BF16 take them; rounded, the largest would be a normal number.
inline Vec without_denormals(Vec x) {
    const Vec least = set1(0x1p-126f);
    return select(less(x, least), select(less(sub(zero(), least), x), mul(x, zero()), x), x);
}

// One row, or its columns from `column` on (a multiple of 32), to bfloat16; the last tile is filled up with zeros.
void round_bf16(const float* x, int cols, const octavo::Quantised& to, size_t row, size_t column) {
    for (size_t tile = column / octavo::kGroup; cols > 0; ++tile, cols -= octavo::kGroup, x += octavo::kGroup) {
        uint16_t* words = to.tiles + tile_offset(to, row, tile);
        store_bf16(words, without_denormals(load(x)));
        store_bf16(words + kLanes, cols > kLanes ? without_denormals(load(x + kLanes)) : zero());
    }
}

void gated_mul(octavo::Gate gate, const float* g, const float* up, size_t n, float* out) {
    if (gate == octavo::Gate::kSilu) {
        for (size_t i = 0; i < n; i += kLanes) {
            const Vec x = load(g + i);
            store(out + i, mul(mul(x, sigmoid(x)), load(up + i)));
        }
        return;
    }
    // gelu, tanh form: x/2 (1 + tanh(z)) = x sigmoid(2 z), z = sqrt(2/pi) (x + 0.044715 x^3)
    for (size_t i = 0; i < n; i += kLanes) {
        const Vec x = load(g + i);
        const Vec cubic = fma(mul(mul(x, x), x), set1(0.044715f), x);
        store(out + i, mul(mul(x, sigmoid(mul(cubic, set1(1.59576912f)))), load(up + i)));
    }
}

void add_arrays(const float* a, const float* b, size_t n, float* out) {
    for (size_t i = 0; i < n; i += kLanes) store(out + i, add(load(a + i), load(b + i)));
}

void scale_array(const float* x, float factor, size_t n, float* out) {
    const Vec f = set1(factor);
    for (size_t i = 0; i < n; i += kLanes) store(out + i, mul(load(x + i), f));
}

// out = cap * tanh(x / cap)
void soft_cap(const float* x, float cap, size_t n, float* out) {
    const Vec c = set1(cap), inverse = set1(1.0f / cap);
    for (size_t i = 0; i < n; i += kLanes) store(out + i, mul(c, tanh(mul(load(x + i), inverse))));
}

}  // namespace
