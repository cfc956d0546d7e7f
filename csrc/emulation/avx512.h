// The AVX-512 intrinsics that octavo's kernels use, on AVX2: the same source files run on hosts without AVX-512, so
// that tests can compare them with the generic kernels. Written from the operation sections of Intel's manual. Not for
// speed.
#pragma once

#include <immintrin.h>
#include <stdint.h>

namespace {
namespace emulated {

struct M512 {
    __m256 lo, hi;
};
struct M512i {
    __m256i lo, hi;
};
using M16 = uint16_t;

inline M512 make(__m256 lo, __m256 hi) { return {lo, hi}; }
inline M512i make(__m256i lo, __m256i hi) { return {lo, hi}; }

#define OCTAVO_UNARY(name, Type, half) \
    inline Type name(Type a) { return make(half(a.lo), half(a.hi)); }
#define OCTAVO_BINARY(name, Type, half) \
    inline Type name(Type a, Type b) { return make(half(a.lo, b.lo), half(a.hi, b.hi)); }
OCTAVO_UNARY(sqrt_ps, M512, _mm256_sqrt_ps)
OCTAVO_BINARY(add_ps, M512, _mm256_add_ps)
OCTAVO_BINARY(sub_ps, M512, _mm256_sub_ps)
OCTAVO_BINARY(mul_ps, M512, _mm256_mul_ps)
OCTAVO_BINARY(div_ps, M512, _mm256_div_ps)
OCTAVO_BINARY(max_ps, M512, _mm256_max_ps)
OCTAVO_BINARY(min_ps, M512, _mm256_min_ps)
OCTAVO_BINARY(add_epi32, M512i, _mm256_add_epi32)
OCTAVO_BINARY(max_epi32, M512i, _mm256_max_epi32)
OCTAVO_BINARY(max_epu16, M512i, _mm256_max_epu16)
OCTAVO_BINARY(and_si512, M512i, _mm256_and_si256)
OCTAVO_BINARY(or_si512, M512i, _mm256_or_si256)
OCTAVO_BINARY(shuffle_epi8, M512i, _mm256_shuffle_epi8)
OCTAVO_BINARY(unpackhi_epi32, M512i, _mm256_unpackhi_epi32)
OCTAVO_BINARY(unpackhi_epi64, M512i, _mm256_unpackhi_epi64)
OCTAVO_BINARY(unpacklo_epi32, M512i, _mm256_unpacklo_epi32)
OCTAVO_BINARY(unpacklo_epi64, M512i, _mm256_unpacklo_epi64)
OCTAVO_BINARY(xor_si512, M512i, _mm256_xor_si256)
#undef OCTAVO_UNARY
#undef OCTAVO_BINARY

inline M512 set1_ps(float x) { return make(_mm256_set1_ps(x), _mm256_set1_ps(x)); }
inline M512 setzero_ps() { return set1_ps(0.0f); }
inline M512i set1_epi32(int x) { return make(_mm256_set1_epi32(x), _mm256_set1_epi32(x)); }
inline M512i set1_epi8(char x) { return make(_mm256_set1_epi8(x), _mm256_set1_epi8(x)); }
inline M512i setzero_si512() { return set1_epi32(0); }
inline M512 loadu_ps(const float* p) { return make(_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)); }
inline void storeu_ps(float* p, M512 x) {
    _mm256_storeu_ps(p, x.lo);
    _mm256_storeu_ps(p + 8, x.hi);
}
inline M512i loadu_si512(const void* p) {
    const __m256i* halves = static_cast<const __m256i*>(p);
    return make(_mm256_loadu_si256(halves), _mm256_loadu_si256(halves + 1));
}
inline void storeu_si512(void* p, M512i x) {
    __m256i* halves = static_cast<__m256i*>(p);
    _mm256_storeu_si256(halves, x.lo);
    _mm256_storeu_si256(halves + 1, x.hi);
}
inline M512 castsi512_ps(M512i x) { return make(_mm256_castsi256_ps(x.lo), _mm256_castsi256_ps(x.hi)); }
inline M512i castps_si512(M512 x) { return make(_mm256_castps_si256(x.lo), _mm256_castps_si256(x.hi)); }
inline __m256 castps512_ps256(M512 x) { return x.lo; }
inline __m256i castsi512_si256(M512i x) { return x.lo; }
inline __m256 extractf32x8_ps(M512 x, int half) { return half ? x.hi : x.lo; }
inline __m256i extracti64x4_epi64(M512i x, int half) { return half ? x.hi : x.lo; }
inline M512i slli_epi32(M512i x, unsigned n) {
    return make(_mm256_slli_epi32(x.lo, static_cast<int>(n)), _mm256_slli_epi32(x.hi, static_cast<int>(n)));
}
inline M512i srli_epi32(M512i x, unsigned n) {
    return make(_mm256_srli_epi32(x.lo, static_cast<int>(n)), _mm256_srli_epi32(x.hi, static_cast<int>(n)));
}
inline M512i srli_epi16(M512i x, unsigned n) {
    return make(_mm256_srli_epi16(x.lo, static_cast<int>(n)), _mm256_srli_epi16(x.hi, static_cast<int>(n)));
}
inline M512i slli_epi16(M512i x, unsigned n) {
    return make(_mm256_slli_epi16(x.lo, static_cast<int>(n)), _mm256_slli_epi16(x.hi, static_cast<int>(n)));
}
inline M512i sub_epi8(M512i a, M512i b) { return make(_mm256_sub_epi8(a.lo, b.lo), _mm256_sub_epi8(a.hi, b.hi)); }
inline M512i broadcast_i32x4(__m128i x) { return make(_mm256_broadcastsi128_si256(x), _mm256_broadcastsi128_si256(x)); }
inline M512 fmadd_ps(M512 a, M512 b, M512 c) {
    return make(_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi));
}
inline M512 fnmadd_ps(M512 a, M512 b, M512 c) {
    return make(_mm256_fnmadd_ps(a.lo, b.lo, c.lo), _mm256_fnmadd_ps(a.hi, b.hi, c.hi));
}
inline M512i cvtps_epi32(M512 x) { return make(_mm256_cvtps_epi32(x.lo), _mm256_cvtps_epi32(x.hi)); }
inline M512 cvtepi32_ps(M512i x) { return make(_mm256_cvtepi32_ps(x.lo), _mm256_cvtepi32_ps(x.hi)); }
inline M512i cvtepu16_epi32(__m256i x) {
    return make(_mm256_cvtepu16_epi32(_mm256_castsi256_si128(x)),
                _mm256_cvtepu16_epi32(_mm256_extracti128_si256(x, 1)));
}
inline M512 cvtph_ps(__m256i x) {
    return make(_mm256_cvtph_ps(_mm256_castsi256_si128(x)), _mm256_cvtph_ps(_mm256_extracti128_si256(x, 1)));
}
// Truncating down-conversions: the low part of each lane.
inline __m128i cvtepi32_epi8(M512i x) {
    uint32_t in[16];
    uint8_t out[16];
    storeu_si512(in, x);
    for (int i = 0; i < 16; ++i) out[i] = static_cast<uint8_t>(in[i]);
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(out));
}
inline __m256i cvtepi32_epi16(M512i x) {
    uint32_t in[16];
    uint16_t out[16];
    storeu_si512(in, x);
    for (int i = 0; i < 16; ++i) out[i] = static_cast<uint16_t>(in[i]);
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(out));
}
template <int Predicate>
inline M16 cmp_ps_mask(M512 a, M512 b) {
    const int lo = _mm256_movemask_ps(_mm256_cmp_ps(a.lo, b.lo, Predicate));
    const int hi = _mm256_movemask_ps(_mm256_cmp_ps(a.hi, b.hi, Predicate));
    return static_cast<M16>(lo | hi << 8);
}
// Lanes of b where the mask is set, else of a.
inline M512i mask_blend_epi32(M16 mask, M512i a, M512i b) {
    uint32_t x[16], y[16];
    storeu_si512(x, a);
    storeu_si512(y, b);
    for (int i = 0; i < 16; ++i) x[i] = mask >> i & 1 ? y[i] : x[i];
    return loadu_si512(x);
}
inline M512 mask_blend_ps(M16 mask, M512 a, M512 b) {
    return castsi512_ps(mask_blend_epi32(mask, castps_si512(a), castps_si512(b)));
}
// VPDPBUSD: per lane, four products of unsigned bytes of a with signed bytes of b are added to the sum, without
// saturation.
inline M512i dpbusd_epi32(M512i sum, M512i a, M512i b) {
    int32_t s[16];
    uint8_t x[64];
    int8_t y[64];
    storeu_si512(s, sum);
    storeu_si512(x, a);
    storeu_si512(y, b);
    for (int i = 0; i < 64; ++i) s[i / 4] += static_cast<int32_t>(x[i]) * static_cast<int32_t>(y[i]);
    return loadu_si512(s);
}

// Per lane: a shift to the right by its own count.
inline M512i srlv_epi32(M512i x, M512i counts) {
    return make(_mm256_srlv_epi32(x.lo, counts.lo), _mm256_srlv_epi32(x.hi, counts.hi));
}
inline M512i srlv_epi64(M512i x, M512i counts) {
    return make(_mm256_srlv_epi64(x.lo, counts.lo), _mm256_srlv_epi64(x.hi, counts.hi));
}
inline M512i broadcast_i64x4(__m256i x) { return make(x, x); }
inline M512i cvtepi8_epi32(__m128i x) {
    return make(_mm256_cvtepi8_epi32(x), _mm256_cvtepi8_epi32(_mm_srli_si128(x, 8)));
}
// Lane i is the lane of a, or of a and then b, that index i names by its low bits.
inline M512i permutexvar_epi32(M512i index, M512i a) {
    uint32_t i[16], x[16], out[16];
    storeu_si512(i, index);
    storeu_si512(x, a);
    for (int lane = 0; lane < 16; ++lane) out[lane] = x[i[lane] & 15];
    return loadu_si512(out);
}
inline M512 permutexvar_ps(M512i index, M512 a) { return castsi512_ps(permutexvar_epi32(index, castps_si512(a))); }
inline M512i permutex2var_epi32(M512i a, M512i index, M512i b) {
    uint32_t i[16], x[32], out[16];
    storeu_si512(i, index);
    storeu_si512(x, a);
    storeu_si512(x + 16, b);
    for (int lane = 0; lane < 16; ++lane) out[lane] = x[i[lane] & 31];
    return loadu_si512(out);
}
inline M512i permutexvar_epi16(M512i index, M512i a) {
    uint16_t i[32], x[32], out[32];
    storeu_si512(i, index);
    storeu_si512(x, a);
    for (int lane = 0; lane < 32; ++lane) out[lane] = x[i[lane] & 31];
    return loadu_si512(out);
}
inline M512i permutex2var_epi64(M512i a, M512i index, M512i b) {
    uint64_t i[8], x[16], out[8];
    storeu_si512(i, index);
    storeu_si512(x, a);
    storeu_si512(x + 8, b);
    for (int lane = 0; lane < 8; ++lane) out[lane] = x[i[lane] & 15];
    return loadu_si512(out);
}
// Two parts of 128 bits of a, then two of b.
template <int Control>
inline M512i shuffle_i32x4(M512i a, M512i b) {
    uint64_t x[8], y[8], out[8];
    storeu_si512(x, a);
    storeu_si512(y, b);
    for (int part = 0; part < 4; ++part)
        for (int half = 0; half < 2; ++half)
            out[2 * part + half] = (part < 2 ? x : y)[2 * (Control >> 2 * part & 3) + half];
    return loadu_si512(out);
}
// VCVTNE2PS2BF16: b in the lower half, a in the upper; to nearest even, denormals are zero, NaN becomes quiet.
inline M512i cvtne2ps_pbh(M512 a, M512 b) {
    uint32_t x[32];
    uint16_t out[32];
    storeu_si512(x, castps_si512(b));
    storeu_si512(x + 16, castps_si512(a));
    for (int i = 0; i < 32; ++i) {
        const uint32_t magnitude = x[i] & 0x7FFFFFFFu;
        if (magnitude < 0x00800000u)
            out[i] = static_cast<uint16_t>((x[i] & 0x80000000u) >> 16);
        else if (magnitude > 0x7F800000u)
            out[i] = static_cast<uint16_t>(x[i] >> 16 | 0x40u);
        else
            out[i] = static_cast<uint16_t>((x[i] + 0x7FFFu + (x[i] >> 16 & 1u)) >> 16);
    }
    return loadu_si512(out);
}
// VREDUCEPS with an immediate of 0: x minus the nearest integer, ties to even.
template <int Control>
inline M512 reduce_ps(M512 x) {
    static_assert(Control == _MM_FROUND_TO_NEAREST_INT);
    return make(_mm256_sub_ps(x.lo, _mm256_round_ps(x.lo, Control)),
                _mm256_sub_ps(x.hi, _mm256_round_ps(x.hi, Control)));
}
// VSCALEFPS: a * 2^floor(b), for |b| < 252.
inline __m256 scalef_half(__m256 a, __m256 b) {
    const __m256i n = _mm256_cvtps_epi32(_mm256_floor_ps(b)), half = _mm256_srai_epi32(n, 1);
    const auto power = [](__m256i e) {
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(e, _mm256_set1_epi32(127)), 23));
    };
    return _mm256_mul_ps(_mm256_mul_ps(a, power(half)), power(_mm256_sub_epi32(n, half)));
}
inline M512 scalef_ps(M512 a, M512 b) { return make(scalef_half(a.lo, b.lo), scalef_half(a.hi, b.hi)); }
inline M512i setr_epi32(const int (&lanes)[16]) { return loadu_si512(lanes); }
inline M512 setr_ps(const float (&lanes)[16]) { return loadu_ps(lanes); }

}  // namespace emulated
}  // namespace

#undef _mm512_setr_epi32
#undef _mm512_setr_ps
#define _mm512_setr_epi32(...) emulated::setr_epi32({__VA_ARGS__})
#define _mm512_setr_ps(...) emulated::setr_ps({__VA_ARGS__})
#define _mm512_broadcast_i32x4 emulated::broadcast_i32x4
#define _mm512_broadcast_i64x4 emulated::broadcast_i64x4
#define _mm512_permutex2var_epi64 emulated::permutex2var_epi64
#define _mm512_permutexvar_epi16 emulated::permutexvar_epi16
#define _mm512_shuffle_epi8 emulated::shuffle_epi8
#define _mm512_shuffle_i32x4(a, b, control) emulated::shuffle_i32x4<control>(a, b)
#define _mm512_srlv_epi64 emulated::srlv_epi64
#define _mm512_unpackhi_epi32 emulated::unpackhi_epi32
#define _mm512_unpackhi_epi64 emulated::unpackhi_epi64
#define _mm512_unpacklo_epi32 emulated::unpacklo_epi32
#define _mm512_unpacklo_epi64 emulated::unpacklo_epi64
#define _mm512_srlv_epi32 emulated::srlv_epi32
#define _mm512_cvtepi8_epi32 emulated::cvtepi8_epi32
#define _mm512_permutexvar_epi32 emulated::permutexvar_epi32
#define _mm512_permutexvar_ps emulated::permutexvar_ps
#define _mm512_permutex2var_epi32 emulated::permutex2var_epi32
#define _mm512_cvtne2ps_pbh emulated::cvtne2ps_pbh

#define __m512 emulated::M512
#define __m512i emulated::M512i
#define __mmask16 emulated::M16
#define _mm512_add_epi32 emulated::add_epi32
#define _mm512_add_ps emulated::add_ps
#define _mm512_and_si512 emulated::and_si512
#define _mm512_castps512_ps256 emulated::castps512_ps256
#define _mm512_castps_si512 emulated::castps_si512
#define _mm512_castsi512_ps emulated::castsi512_ps
#define _mm512_castsi512_si256 emulated::castsi512_si256
#define _mm512_cmp_ps_mask(a, b, predicate) emulated::cmp_ps_mask<predicate>(a, b)
#define _mm512_cvtepi32_epi16 emulated::cvtepi32_epi16
#define _mm512_cvtepi32_epi8 emulated::cvtepi32_epi8
#define _mm512_cvtepi32_ps emulated::cvtepi32_ps
#define _mm512_cvtepu16_epi32 emulated::cvtepu16_epi32
#define _mm512_cvtph_ps emulated::cvtph_ps
#define _mm512_cvtps_epi32 emulated::cvtps_epi32
#define _mm512_div_ps emulated::div_ps
#define _mm512_dpbusd_epi32 emulated::dpbusd_epi32
#define _mm512_extractf32x8_ps emulated::extractf32x8_ps
#define _mm512_extracti64x4_epi64 emulated::extracti64x4_epi64
#define _mm512_fmadd_ps emulated::fmadd_ps
#define _mm512_fnmadd_ps emulated::fnmadd_ps
#define _mm512_loadu_ps emulated::loadu_ps
#define _mm512_loadu_si512 emulated::loadu_si512
#define _mm512_mask_blend_epi32 emulated::mask_blend_epi32
#define _mm512_mask_blend_ps emulated::mask_blend_ps
#define _mm512_max_epi32 emulated::max_epi32
#define _mm512_max_epu16 emulated::max_epu16
#define _mm512_max_ps emulated::max_ps
#define _mm512_min_ps emulated::min_ps
#define _mm512_mul_ps emulated::mul_ps
#define _mm512_or_si512 emulated::or_si512
#define _mm512_reduce_ps(x, control) emulated::reduce_ps<control>(x)
#define _mm512_scalef_ps emulated::scalef_ps
#define _mm512_set1_epi32 emulated::set1_epi32
#define _mm512_set1_epi8 emulated::set1_epi8
#define _mm512_set1_ps emulated::set1_ps
#define _mm512_setzero_ps emulated::setzero_ps
#define _mm512_setzero_si512 emulated::setzero_si512
#define _mm512_slli_epi16 emulated::slli_epi16
#define _mm512_slli_epi32 emulated::slli_epi32
#define _mm512_sqrt_ps emulated::sqrt_ps
#define _mm512_srli_epi16 emulated::srli_epi16
#define _mm512_srli_epi32 emulated::srli_epi32
#define _mm512_storeu_ps emulated::storeu_ps
#define _mm512_storeu_si512 emulated::storeu_si512
#define _mm512_sub_epi8 emulated::sub_epi8
#define _mm512_sub_ps emulated::sub_ps
#define _mm512_xor_si512 emulated::xor_si512
