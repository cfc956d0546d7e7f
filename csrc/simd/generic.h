// The vocabulary of sixteen lanes in plain C++: the written-out truth that the other headers of this folder must match
// bit for bit. See ops/README.md for why every op is written in lanes of sixteen.
#pragma once

#include <stdint.h>

namespace {

constexpr int kLanes = 16;
constexpr int kRegisters = 16;  // of vectors

struct Vec {
    float lane[kLanes];
};
struct IVec {
    int32_t lane[kLanes];
};
struct Mask {
    bool lane[kLanes];
};

inline float bits_to_float(uint32_t bits) { return __builtin_bit_cast(float, bits); }
inline uint32_t float_to_bits(float x) { return __builtin_bit_cast(uint32_t, x); }

// IEEE binary16 to binary32, exact.
inline float half_to_float(uint16_t h) {
    const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16;
    const uint32_t exponent = (h >> 10) & 0x1Fu;
    const uint32_t mantissa = h & 0x3FFu;
    if (exponent == 0x1Fu) return bits_to_float(sign | 0x7F800000u | (mantissa << 13) | (mantissa ? 0x400000u : 0u));
    if (exponent) return bits_to_float(sign | ((exponent + 112u) << 23) | (mantissa << 13));
    const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
    return bits_to_float(sign | float_to_bits(magnitude));
}

#define OCTAVO_EACH_LANE for (int i = 0; i < kLanes; ++i)

inline Vec set1(float x) {
    Vec r;
    OCTAVO_EACH_LANE r.lane[i] = x;
    return r;
}
inline Vec zero() { return set1(0.0f); }
inline Vec load(const float* p) {
    Vec r;
    OCTAVO_EACH_LANE r.lane[i] = p[i];
    return r;
}
inline void store(float* p, Vec x) { OCTAVO_EACH_LANE p[i] = x.lane[i]; }
inline Vec load_bf16(const uint16_t* p) {
    Vec r;
    OCTAVO_EACH_LANE r.lane[i] = bits_to_float(static_cast<uint32_t>(p[i]) << 16);
    return r;
}
// Sixteen pairs of neighbours, taken apart.
inline Vec load_bf16_fast(const uint16_t* p) { return load_bf16(p); }
inline Vec from_fast(Vec x) { return x; }
inline Vec to_fast(Vec x) { return x; }
inline void load_bf16_pairs(const uint16_t* p, Vec& even, Vec& odd) {
    OCTAVO_EACH_LANE {
        even.lane[i] = bits_to_float(static_cast<uint32_t>(p[2 * i]) << 16);
        odd.lane[i] = bits_to_float(static_cast<uint32_t>(p[2 * i + 1]) << 16);
    }
}
inline Vec load_f16(const uint16_t* p) {
    Vec r;
    OCTAVO_EACH_LANE r.lane[i] = half_to_float(p[i]);
    return r;
}
inline Vec load_i8(const int8_t* p) {
    Vec r;
    OCTAVO_EACH_LANE r.lane[i] = static_cast<float>(p[i]);
    return r;
}
inline Vec add(Vec a, Vec b) {
    OCTAVO_EACH_LANE a.lane[i] += b.lane[i];
    return a;
}
inline Vec sub(Vec a, Vec b) {
    OCTAVO_EACH_LANE a.lane[i] -= b.lane[i];
    return a;
}
inline Vec mul(Vec a, Vec b) {
    OCTAVO_EACH_LANE a.lane[i] *= b.lane[i];
    return a;
}
inline Vec div(Vec a, Vec b) {
    OCTAVO_EACH_LANE a.lane[i] /= b.lane[i];
    return a;
}
// a * b + c, rounded once
inline Vec fma(Vec a, Vec b, Vec c) {
    OCTAVO_EACH_LANE c.lane[i] = __builtin_fmaf(a.lane[i], b.lane[i], c.lane[i]);
    return c;
}
// c - a * b, rounded once
inline Vec fnma(Vec a, Vec b, Vec c) {
    OCTAVO_EACH_LANE c.lane[i] = __builtin_fmaf(-a.lane[i], b.lane[i], c.lane[i]);
    return c;
}
// a > b ? a : b, like maxps: b where either is NaN
inline Vec max(Vec a, Vec b) {
    OCTAVO_EACH_LANE a.lane[i] = a.lane[i] > b.lane[i] ? a.lane[i] : b.lane[i];
    return a;
}
inline Vec min(Vec a, Vec b) {
    OCTAVO_EACH_LANE a.lane[i] = a.lane[i] < b.lane[i] ? a.lane[i] : b.lane[i];
    return a;
}
inline Vec sqrt(Vec a) {
    OCTAVO_EACH_LANE a.lane[i] = __builtin_sqrtf(a.lane[i]);
    return a;
}
inline Mask less(Vec a, Vec b) {
    Mask m;
    OCTAVO_EACH_LANE m.lane[i] = a.lane[i] < b.lane[i];
    return m;
}
// lanes [first, last)
inline Mask lanes_between(int first, int last) {
    Mask m;
    OCTAVO_EACH_LANE m.lane[i] = i >= first && i < last;
    return m;
}
inline Vec select(Mask m, Vec a, Vec b) {
    OCTAVO_EACH_LANE b.lane[i] = m.lane[i] ? a.lane[i] : b.lane[i];
    return b;
}
// Nearest integer, ties to even; |x| < 2^22.
inline IVec round_to_int(Vec x) {
    IVec r;
    OCTAVO_EACH_LANE r.lane[i] = static_cast<int32_t>(float_to_bits(x.lane[i] + 12582912.0f) - 0x4B400000u);
    return r;
}
inline Vec to_float(IVec x) {
    Vec r;
    OCTAVO_EACH_LANE r.lane[i] = static_cast<float>(x.lane[i]);
    return r;
}
// 2^n for -126 <= n <= 127
inline Vec pow2(IVec n) {
    Vec r;
    OCTAVO_EACH_LANE r.lane[i] = bits_to_float(static_cast<uint32_t>(n.lane[i] + 127) << 23);
    return r;
}
// x minus the nearest integer, ties to even; exact. |x| < 2^22.
inline Vec from_nearest(Vec x) { return sub(x, to_float(round_to_int(x))); }
// p * 2^n for integers n from -126 to 127, and 0 for n = -127.
inline Vec mul_pow2(Vec p, Vec n) { return mul(p, pow2(round_to_int(n))); }
inline IVec iadd(IVec a, IVec b) {
    OCTAVO_EACH_LANE a.lane[i] += b.lane[i];
    return a;
}
inline int32_t reduce_iadd(IVec x) {
    int32_t sum = 0;
    OCTAVO_EACH_LANE sum += x.lane[i];
    return sum;
}
// max of |a| and |b| by their bits, so that NaN and infinity win over every finite number
inline Vec max_magnitude(Vec a, Vec b) {
    OCTAVO_EACH_LANE {
        const uint32_t x = float_to_bits(a.lane[i]) & 0x7FFFFFFFu, y = float_to_bits(b.lane[i]) & 0x7FFFFFFFu;
        a.lane[i] = bits_to_float(x > y ? x : y);
    }
    return a;
}
inline float reduce_max_magnitude(Vec x) {
    uint32_t best = 0;
    OCTAVO_EACH_LANE {
        const uint32_t bits = float_to_bits(x.lane[i]) & 0x7FFFFFFFu;
        best = bits > best ? bits : best;
    }
    return bits_to_float(best);
}
// Low bytes of the lanes.
inline void store_i8(int8_t* p, IVec x) { OCTAVO_EACH_LANE p[i] = static_cast<int8_t>(x.lane[i]); }
// Nearest bfloat16, ties to even; NaN stays NaN.
inline void store_bf16(uint16_t* p, Vec x) {
    OCTAVO_EACH_LANE {
        const uint32_t bits = float_to_bits(x.lane[i]);
        const bool nan = (bits & 0x7FFFFFFFu) > 0x7F800000u;
        p[i] = static_cast<uint16_t>(nan ? (bits >> 16) | 0x40u : (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
    }
}
inline Vec round_to_bf16(Vec x) {
    uint16_t words[kLanes];
    store_bf16(words, x);
    return load_bf16(words);
}
// Sum of the lanes in one fixed tree: i + (i + 8), then 4, 2, 1 apart.
inline float reduce_add(Vec x) {
    for (int width = kLanes / 2; width; width /= 2)
        for (int i = 0; i < width; ++i) x.lane[i] += x.lane[i + width];
    return x.lane[0];
}
inline float reduce_max(Vec x) {
    for (int width = kLanes / 2; width; width /= 2)
        for (int i = 0; i < width; ++i) x.lane[i] = x.lane[i] > x.lane[i + width] ? x.lane[i] : x.lane[i + width];
    return x.lane[0];
}

#undef OCTAVO_EACH_LANE

}  // namespace
