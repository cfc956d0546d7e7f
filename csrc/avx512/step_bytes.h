// A step (4 k of 16 columns) of a packed group as 64 bytes. Include simd/avx512.h first.
#pragma once

#include "../ops/linear_int.h"

namespace {

// f<0>(), ..., f<N - 1>()
template <int N, class F>
inline void steps(const F& f) {
    if constexpr (N > 1) steps<N - 1>(f);
    f.template operator()<N - 1>();
}

// Step I as stored: unsigned, of 8 bits signed; codebooks are not looked up.
template <octavo::WeightKind Kind, int I>
inline __m512i stored_bytes(const uint8_t* w) {
    using Format = IntFormat<Kind>;
    constexpr int kLow = Format::kLayout.low_bits, kHigh = Format::kLayout.high_bits;
    if constexpr (kLow == 8) return _mm512_loadu_si512(w + I * 64);
    constexpr int kByte = kLow == 4 ? I % 4 : I / 4, kShift = kLow == 4 ? I / 4 * 4 : I % 4 * 2;
    const __m512i low = _mm512_set1_epi8((1 << kLow) - 1);
    __m512i q = _mm512_and_si512(_mm512_srli_epi16(_mm512_loadu_si512(w + kByte * 64), kShift), low);
    if constexpr (kHigh > 0) {
        constexpr int kPosition = kHigh == 1 ? I : I % 4 * 2;
        const __m512i plane = _mm512_loadu_si512(w + Format::kLowBytes + (kHigh == 1 ? 0 : I / 4) * 64);
        const __m512i moved = kPosition < kLow ? _mm512_slli_epi16(plane, kPosition < kLow ? kLow - kPosition : 0)
                                               : _mm512_srli_epi16(plane, kPosition < kLow ? 0 : kPosition - kLow);
        q = _mm512_or_si512(q, _mm512_and_si512(moved, _mm512_set1_epi8(((1 << kHigh) - 1) << kLow)));
    }
    return q;
}

inline __m512i code_levels() {
    return _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(octavo::kCodeLevels)));
}

// As unsigned bytes of which unsigned_zero is 0.
template <octavo::WeightKind Kind>
constexpr int unsigned_zero() {
    const octavo::IntLayout l = IntFormat<Kind>::kLayout;
    return l.low_bits == 8 || l.codebook ? 128 : IntFormat<Kind>::kZero;
}
template <octavo::WeightKind Kind, int I>
inline __m512i unsigned_bytes(const uint8_t* w) {
    const __m512i q = stored_bytes<Kind, I>(w), sign = _mm512_set1_epi8(static_cast<char>(0x80));
    if constexpr (IntFormat<Kind>::kLayout.low_bits == 8) return _mm512_xor_si512(q, sign);
    if constexpr (IntFormat<Kind>::kLayout.codebook)
        return _mm512_shuffle_epi8(_mm512_xor_si512(code_levels(), sign), q);
    return q;
}
// As signed bytes: the integers that are multiplied by d.
template <octavo::WeightKind Kind, int I>
inline __m512i signed_bytes(const uint8_t* w) {
    const __m512i q = stored_bytes<Kind, I>(w);
    if constexpr (IntFormat<Kind>::kLayout.codebook) return _mm512_shuffle_epi8(code_levels(), q);
    constexpr int kZero = IntFormat<Kind>::kZero;
    return kZero ? _mm512_sub_epi8(q, _mm512_set1_epi8(kZero)) : q;
}

}  // namespace
