// The vocabulary of sixteen lanes as one AVX-512 register (F, BW, DQ, VL). Same results as simd/generic.h, bit for bit.
#pragma once

#if defined(OCTAVO_EMULATED)
#include "../emulation/avx512.h"
#else
#include <immintrin.h>
#endif
#include <stdint.h>

namespace {

constexpr int kLanes = 16;
constexpr int kRegisters = 32;  // of vectors

using Vec = __m512;
using IVec = __m512i;
using Mask = __mmask16;

inline Vec set1(float x) { return _mm512_set1_ps(x); }
inline Vec zero() { return _mm512_setzero_ps(); }
inline Vec load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, Vec x) { _mm512_storeu_ps(p, x); }
inline __m256i load_words(const uint16_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
inline Vec load_bf16(const uint16_t* p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(load_words(p)), 16));
}
inline Vec load_bf16_fast(const uint16_t* p) { return load_bf16(p); }
inline Vec from_fast(Vec x) { return x; }
inline Vec to_fast(Vec x) { return x; }
inline void load_bf16_pairs(const uint16_t* p, Vec& even, Vec& odd) {
    const __m512i words = _mm512_loadu_si512(p);
    even = _mm512_castsi512_ps(_mm512_slli_epi32(words, 16));
    odd = _mm512_castsi512_ps(_mm512_and_si512(words, _mm512_set1_epi32(static_cast<int>(0xFFFF0000u))));
}
inline Vec load_f16(const uint16_t* p) { return _mm512_cvtph_ps(load_words(p)); }
inline Vec load_i8(const int8_t* p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
inline Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
inline Vec sub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
inline Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
inline Vec div(Vec a, Vec b) { return _mm512_div_ps(a, b); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
inline Vec fnma(Vec a, Vec b, Vec c) { return _mm512_fnmadd_ps(a, b, c); }
inline Vec max(Vec a, Vec b) { return _mm512_max_ps(a, b); }
inline Vec min(Vec a, Vec b) { return _mm512_min_ps(a, b); }
inline Vec sqrt(Vec a) { return _mm512_sqrt_ps(a); }
inline Mask less(Vec a, Vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
inline uint32_t lanes_below(int n) { return n <= 0 ? 0u : n >= kLanes ? 0xFFFFu : (1u << n) - 1u; }
inline Mask lanes_between(int first, int last) { return static_cast<Mask>(lanes_below(last) & ~lanes_below(first)); }
inline Vec select(Mask m, Vec a, Vec b) { return _mm512_mask_blend_ps(m, b, a); }
inline IVec round_to_int(Vec x) { return _mm512_cvtps_epi32(x); }
inline Vec to_float(IVec x) { return _mm512_cvtepi32_ps(x); }
inline Vec pow2(IVec n) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(n, _mm512_set1_epi32(127)), 23));
}
inline Vec from_nearest(Vec x) { return _mm512_reduce_ps(x, _MM_FROUND_TO_NEAREST_INT); }
inline Vec mul_pow2(Vec p, Vec n) { return _mm512_scalef_ps(p, n); }  // at -127 a denormal, which the CPU flushes
inline IVec iadd(IVec a, IVec b) { return _mm512_add_epi32(a, b); }
inline int32_t reduce_iadd(IVec x) {
    const __m256i eight = _mm256_add_epi32(_mm512_castsi512_si256(x), _mm512_extracti64x4_epi64(x, 1));
    __m128i four = _mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
    four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4E));
    return _mm_cvtsi128_si32(_mm_add_epi32(four, _mm_shuffle_epi32(four, 0xB1)));
}
inline __m512i magnitude(Vec x) { return _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(0x7FFFFFFF)); }
inline Vec max_magnitude(Vec a, Vec b) { return _mm512_castsi512_ps(_mm512_max_epi32(magnitude(a), magnitude(b))); }
inline float reduce_max_magnitude(Vec x) {
    const __m512i all = magnitude(x);
    const __m256i eight = _mm256_max_epi32(_mm512_castsi512_si256(all), _mm512_extracti64x4_epi64(all, 1));
    __m128i four = _mm_max_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
    four = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0x4E));
    four = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0xB1));
    return _mm_cvtss_f32(_mm_castsi128_ps(four));
}
inline void store_i8(int8_t* p, IVec x) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(x)); }
// Nearest bfloat16 in the upper half of each lane; the lower half is anything.
inline __m512i bf16_bits(Vec x) {
    const __m512i bits = _mm512_castps_si512(x);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF)));
    const __m512i quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x400000));
    const Mask nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    return _mm512_mask_blend_epi32(nan, rounded, quiet);
}
inline void store_bf16(uint16_t* p, Vec x) {
    const __m256i words = _mm512_cvtepi32_epi16(_mm512_srli_epi32(bf16_bits(x), 16));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), words);
}
inline Vec round_to_bf16(Vec x) {
    return _mm512_castsi512_ps(_mm512_and_si512(bf16_bits(x), _mm512_set1_epi32(static_cast<int>(0xFFFF0000u))));
}
inline float reduce_add(Vec x) {
    const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    four = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(four, _mm_shuffle_ps(four, four, 1)));
}
inline float reduce_max(Vec x) {
    const __m256 eight = _mm256_max_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    four = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(four, _mm_shuffle_ps(four, four, 1)));
}

}  // namespace
