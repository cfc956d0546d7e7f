// Rotary embedding and the write into the paged cache, one token at a time. Include one of simd/*.h first.
#pragma once

#include "math.h"

namespace {

inline void rotate(Vec& a, Vec& b, Vec cos, Vec sin) {
    const Vec rotated = fnma(b, sin, mul(a, cos));
    b = fma(a, sin, mul(b, cos));
    a = rotated;
}

// Pairs i and i + rope_dim / 2 of each head.
void rope(const octavo::RopeTask& t) {
    const int half = t.rope_dim / 2;
    for (int h = 0; h < t.num_heads; ++h) {
        float* x = t.x + h * t.head_dim;
        int i = 0;
        for (; i + kLanes <= half; i += kLanes) {
            Vec a = load(x + i), b = load(x + half + i);
            rotate(a, b, load(t.cos + i), load(t.sin + i));
            store(x + i, a);
            store(x + half + i, b);
        }
        if (const int rest = half - i) {
            Vec a = load_tail(x + i, rest, 0.0f), b = load_tail(x + half + i, rest, 0.0f);
            rotate(a, b, load_tail(t.cos + i, rest, 0.0f), load_tail(t.sin + i, rest, 0.0f));
            store_tail(x + i, rest, a);
            store_tail(x + half + i, rest, b);
        }
    }
}

inline void store_kv(float* p, Vec x) { store(p, x); }
inline void store_kv(uint16_t* p, Vec x) { store_bf16(p, x); }

template <class T>
void write_kv_as(const octavo::KvWriteTask& t) {
    T lanes[kLanes];
    for (int h = 0; h < t.num_heads; ++h) {
        T* k_out = static_cast<T*>(t.k_out) + h * t.head_stride;
        T* v_out = static_cast<T*>(t.v_out) + h * t.head_stride;
        for (int d = 0; d < t.head_dim; d += kLanes) {
            const int n = t.head_dim - d < kLanes ? t.head_dim - d : kLanes;
            const float *k = t.k + h * t.head_dim + d, *v = t.v + h * t.head_dim + d;
            store_kv(lanes, n == kLanes ? load(k) : load_tail(k, n, 0.0f));
            for (int i = 0; i < n; ++i) k_out[(d + i) * t.k_stride] = lanes[i];
            store_kv(v_out + d, n == kLanes ? load(v) : load_tail(v, n, 0.0f));  // v_dim is padded: whole stores
        }
    }
}

// K goes in transposed (positions innermost), so that a K vector holds 16 positions of one dimension; V row by row.
void write_kv(const octavo::KvWriteTask& t) { t.kv_bf16 ? write_kv_as<uint16_t>(t) : write_kv_as<float>(t); }

}  // namespace
