// Elementwise ops, row norms and the quantisation of activations. Include one of simd/*.h first.
#pragma once

#include "math.h"

namespace {

// A row of `width` floats, or one head of it: out = x / sqrt(mean(x^2) + eps) * weight. Squares are summed in 16
// running sums (lane = index mod 16), then as a tree. Nothing beyond `width` is read or written.
void rms_norm(const float* x, const float* weight, int width, float eps, float* out) {
    const int rest = width % kLanes, whole = width - rest;
    Vec squares = zero();
    for (int i = 0; i < whole; i += kLanes) {
        const Vec v = load(x + i);
        squares = fma(v, v, squares);
    }
    const Vec tail = rest ? load_tail(x + whole, rest, 0.0f) : zero();
    if (rest) squares = fma(tail, tail, squares);
    const float mean = reduce_add(squares) / static_cast<float>(width);
    const Vec factor = div(set1(1.0f), sqrt(set1(mean + eps)));
    for (int i = 0; i < whole; i += kLanes) store(out + i, mul(mul(load(x + i), factor), load(weight + i)));
    if (rest) store_tail(out + whole, rest, mul(mul(tail, factor), load_tail(weight + whole, rest, 0.0f)));
}

// out = (x - mean(x)) / sqrt(mean((x - mean(x))^2) + eps) * weight + bias, in two passes, summed like rms_norm.
// bias may be null.
void layer_norm(const float* x, const float* weight, const float* bias, int width, float eps, float* out) {
    const int rest = width % kLanes, whole = width - rest;
    Vec sums = zero(), squares = zero();
    for (int i = 0; i < whole; i += kLanes) sums = add(sums, load(x + i));
    if (rest) sums = add(sums, load_tail(x + whole, rest, 0.0f));
    const float mean = reduce_add(sums) / static_cast<float>(width);
    const Vec middle = set1(mean);
    for (int i = 0; i < whole; i += kLanes) {
        const Vec v = sub(load(x + i), middle);
        squares = fma(v, v, squares);
    }
    const Vec tail = rest ? sub(load_tail(x + whole, rest, mean), middle) : zero();
    if (rest) squares = fma(tail, tail, squares);
    const float variance = reduce_add(squares) / static_cast<float>(width);
    const Vec factor = div(set1(1.0f), sqrt(set1(variance + eps)));
    for (int i = 0; i < whole; i += kLanes) {
        const Vec v = mul(sub(load(x + i), middle), factor);
        store(out + i, bias ? fma(v, load(weight + i), load(bias + i)) : mul(v, load(weight + i)));
    }
    if (rest) {
        const Vec v = mul(tail, factor), w = load_tail(weight + whole, rest, 0.0f);
        store_tail(out + whole, rest, bias ? fma(v, w, load_tail(bias + whole, rest, 0.0f)) : mul(v, w));
    }
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

struct Silu {
    static Vec of(Vec x) { return mul(x, sigmoid(x)); }
};

// gelu, tanh form: x/2 (1 + tanh(z)) = x sigmoid(2 z), z = sqrt(2/pi) (x + 0.044715 x^3)
struct GeluTanh {
    static Vec of(Vec x) {
        const Vec cubic = fma(mul(mul(x, x), x), set1(0.044715f), x);
        return mul(x, sigmoid(mul(cubic, set1(1.59576912f))));
    }
};

// gelu itself: x times the normal distribution's share below x
struct GeluErf {
    static Vec of(Vec x) {
        const Vec share = normal_tail(x);
        return mul(x, select(less(x, zero()), share, sub(set1(1.0f), share)));
    }
};

template <class Activation>
void multiply_activated(const float* g, const float* up, size_t n, float* out) {
    for (size_t i = 0; i < n; i += kLanes) store(out + i, mul(Activation::of(load(g + i)), load(up + i)));
}

template <class Activation>
void activate(const float* x, size_t n, float* out) {
    for (size_t i = 0; i < n; i += kLanes) store(out + i, Activation::of(load(x + i)));
}

void gated_mul(octavo::Gate gate, const float* g, const float* up, size_t n, float* out) {
    if (gate == octavo::Gate::kSilu) return multiply_activated<Silu>(g, up, n, out);
    if (gate == octavo::Gate::kGelu) return multiply_activated<GeluTanh>(g, up, n, out);
    multiply_activated<GeluErf>(g, up, n, out);
}

void activation(octavo::Gate gate, const float* x, size_t n, float* out) {
    if (gate == octavo::Gate::kSilu) return activate<Silu>(x, n, out);
    if (gate == octavo::Gate::kGelu) return activate<GeluTanh>(x, n, out);
    activate<GeluErf>(x, n, out);
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
