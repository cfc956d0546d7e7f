// The vocabulary of sixteen lanes as two AVX2 registers. Same results as simd/generic.h, bit for bit.
#pragma once

#include <immintrin.h>
#include <stdint.h>

namespace {

constexpr int kLanes = 16;
constexpr int kRegisters = 16;  // of vectors

struct Vec {
    __m256 lo, hi;
};
struct IVec {
    __m256i lo, hi;
};
using Mask = Vec;

inline Vec set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline Vec zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline Vec load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store(float* p, Vec x) {
    _mm256_storeu_ps(p, x.lo);
    _mm256_storeu_ps(p + 8, x.hi);
}
inline __m256 bf16_to_float(const uint16_t* p) {
    const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
inline Vec load_bf16(const uint16_t* p) { return {bf16_to_float(p), bf16_to_float(p + 8)}; }
// Lanes in the order 0 2 4 ... 14 1 3 5 ... 15, for half the work; from_fast puts them into theirs, to_fast back.
inline Vec load_bf16_fast(const uint16_t* p) {
    const __m256i pairs = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    const __m256i high = _mm256_set1_epi32(static_cast<int>(0xFFFF0000u));
    return {_mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16)), _mm256_castsi256_ps(_mm256_and_si256(pairs, high))};
}
inline Vec from_fast(Vec x) {
    const __m256 a = _mm256_unpacklo_ps(x.lo, x.hi), b = _mm256_unpackhi_ps(x.lo, x.hi);
    return {_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31)};
}
inline Vec to_fast(Vec x) {
    const __m256 a = _mm256_permute2f128_ps(x.lo, x.hi, 0x20), b = _mm256_permute2f128_ps(x.lo, x.hi, 0x31);
    return {_mm256_shuffle_ps(a, b, 0x88), _mm256_shuffle_ps(a, b, 0xDD)};
}
inline void load_bf16_pairs(const uint16_t* p, Vec& even, Vec& odd) {
    const __m256i a = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    const __m256i b = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 16));
    const __m256i high = _mm256_set1_epi32(static_cast<int>(0xFFFF0000u));
    even = {_mm256_castsi256_ps(_mm256_slli_epi32(a, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(b, 16))};
    odd = {_mm256_castsi256_ps(_mm256_and_si256(a, high)), _mm256_castsi256_ps(_mm256_and_si256(b, high))};
}
inline __m256 half_to_float(const uint16_t* p) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline Vec load_f16(const uint16_t* p) { return {half_to_float(p), half_to_float(p + 8)}; }
inline Vec load_i8(const int8_t* p) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)),
            _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(bytes, 8)))};
}
inline Vec add(Vec a, Vec b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
inline Vec sub(Vec a, Vec b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
inline Vec mul(Vec a, Vec b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
inline Vec div(Vec a, Vec b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
inline Vec fma(Vec a, Vec b, Vec c) { return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)}; }
inline Vec fnma(Vec a, Vec b, Vec c) {
    return {_mm256_fnmadd_ps(a.lo, b.lo, c.lo), _mm256_fnmadd_ps(a.hi, b.hi, c.hi)};
}
inline Vec max(Vec a, Vec b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
inline Vec min(Vec a, Vec b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }
inline Vec sqrt(Vec a) { return {_mm256_sqrt_ps(a.lo), _mm256_sqrt_ps(a.hi)}; }
inline Mask less(Vec a, Vec b) {
    return {_mm256_cmp_ps(a.lo, b.lo, _CMP_LT_OQ), _mm256_cmp_ps(a.hi, b.hi, _CMP_LT_OQ)};
}
inline __m256 lane_mask(__m256i lane, __m256i first, __m256i last) {
    return _mm256_castsi256_ps(_mm256_andnot_si256(_mm256_cmpgt_epi32(first, lane), _mm256_cmpgt_epi32(last, lane)));
}
inline Mask lanes_between(int first, int last) {
    const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    const __m256i from = _mm256_set1_epi32(first), to = _mm256_set1_epi32(last);
    return {lane_mask(lane, from, to), lane_mask(_mm256_add_epi32(lane, _mm256_set1_epi32(8)), from, to)};
}
inline Vec select(Mask m, Vec a, Vec b) {
    return {_mm256_blendv_ps(b.lo, a.lo, m.lo), _mm256_blendv_ps(b.hi, a.hi, m.hi)};
}
inline IVec round_to_int(Vec x) { return {_mm256_cvtps_epi32(x.lo), _mm256_cvtps_epi32(x.hi)}; }
inline Vec to_float(IVec x) { return {_mm256_cvtepi32_ps(x.lo), _mm256_cvtepi32_ps(x.hi)}; }
inline __m256 pow2_half(__m256i n) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n, _mm256_set1_epi32(127)), 23));
}
inline Vec pow2(IVec n) { return {pow2_half(n.lo), pow2_half(n.hi)}; }
inline Vec from_nearest(Vec x) { return sub(x, to_float(round_to_int(x))); }
inline Vec mul_pow2(Vec p, Vec n) { return mul(p, pow2(round_to_int(n))); }
inline IVec iadd(IVec a, IVec b) { return {_mm256_add_epi32(a.lo, b.lo), _mm256_add_epi32(a.hi, b.hi)}; }
inline int32_t reduce_iadd(IVec x) {
    const __m256i eight = _mm256_add_epi32(x.lo, x.hi);
    __m128i four = _mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
    four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4E));
    return _mm_cvtsi128_si32(_mm_add_epi32(four, _mm_shuffle_epi32(four, 0xB1)));
}
inline __m256i magnitude(__m256 x) { return _mm256_and_si256(_mm256_castps_si256(x), _mm256_set1_epi32(0x7FFFFFFF)); }
inline Vec max_magnitude(Vec a, Vec b) {
    return {_mm256_castsi256_ps(_mm256_max_epi32(magnitude(a.lo), magnitude(b.lo))),
            _mm256_castsi256_ps(_mm256_max_epi32(magnitude(a.hi), magnitude(b.hi)))};
}
inline float reduce_max_magnitude(Vec x) {
    const __m256i eight = _mm256_max_epi32(magnitude(x.lo), magnitude(x.hi));
    __m128i four = _mm_max_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
    four = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0x4E));
    four = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0xB1));
    return _mm_cvtss_f32(_mm_castsi128_ps(four));
}
inline void store_i8(int8_t* p, IVec x) {
    const __m256i low = _mm256_set1_epi32(0xFF);  // the packs saturate: keep low bytes, as the generic form does
    const __m256i words = _mm256_packus_epi32(_mm256_and_si256(x.lo, low), _mm256_and_si256(x.hi, low));
    const __m256i bytes = _mm256_packus_epi16(words, words);  // 64-bit quarters: lanes 0-3 8-11 | 4-7 12-15
    const __m128i first = _mm256_castsi256_si128(bytes), second = _mm256_extracti128_si256(bytes, 1);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm_unpacklo_epi32(first, second));
}
inline __m128i to_bf16(__m256 x) {
    const __m256i bits = _mm256_castps_si256(x);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF)));
    const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    const __m256i high = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, nan), 16);
    return _mm_packus_epi32(_mm256_castsi256_si128(high), _mm256_extracti128_si256(high, 1));
}
inline void store_bf16(uint16_t* p, Vec x) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), to_bf16(x.lo));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p + 8), to_bf16(x.hi));
}
inline Vec round_to_bf16(Vec x) {
    uint16_t words[kLanes];
    store_bf16(words, x);
    return load_bf16(words);
}
inline float reduce_add(Vec x) {
    const __m256 eight = _mm256_add_ps(x.lo, x.hi);
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    four = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(four, _mm_shuffle_ps(four, four, 1)));
}
inline float reduce_max(Vec x) {
    const __m256 eight = _mm256_max_ps(x.lo, x.hi);
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    four = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(four, _mm_shuffle_ps(four, four, 1)));
}

}  // namespace
