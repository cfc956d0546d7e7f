// Products with int8 and int4 weights in AVX2. Numerics: ops/linear_int.h.
//
// A tile is R rows times H halves of a panel (8 columns per register; a lane holds one column and 4 values of k).
//   int4: maddubs takes the nibbles (0..15) as its unsigned side; a pair sums to at most 15 * 127 * 2 = 3810, so the 8
//         pairs of a group fit in 16 bits (30480) and are widened once per group.
//   int8: maddubs(|w|, sign(x, w)): a pair is at most 128 * 127 * 2 = 32512, so no saturation, but widened every time.
#pragma once

#include "../ops/linear_int.h"

namespace {

using octavo::kGroup;
using octavo::LinearTask;
using octavo::WeightKind;

// How far ahead few rows fetch their weights; 1 to 8 KB measured alike, none costs 40 % (Zen 1, from DRAM).
constexpr int kPrefetchBytes = 2048;
constexpr int kManyRows = 8;  // from which on widening was measured to be faster

inline __m256i load_bytes(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
// Keeps a sum in its register: GCC would reorder exact sums into trees and spill all their leaves.
inline void pin(__m256i& x) { __asm__("" : "+x"(x)); }
inline __m256i broadcast4(const int8_t* p) {
    int32_t four;
    __builtin_memcpy(&four, p, 4);
    return _mm256_set1_epi32(four);
}

// Exact sums of one group for R rows and H halves.
template <bool Nibbles, int R, int H>
struct GroupSums;

template <int R, int H>
struct GroupSums<true, R, H> {
    static inline void run(const uint8_t* w, const int8_t* const* x, int k, __m256i (&out)[R][H]) {
        const __m256i low = _mm256_set1_epi8(15);
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
            __m256i even[H], odd[H];
            for (int h = 0; h < H; ++h) {
                const __m256i bytes = load_bytes(w + i * 64 + h * 32);
                even[h] = _mm256_and_si256(bytes, low);
                odd[h] = _mm256_and_si256(_mm256_srli_epi16(bytes, 4), low);
            }
            for (int r = 0; r < R; ++r) {
                const __m256i xe = broadcast4(x[r] + k + 4 * i), xo = broadcast4(x[r] + k + 16 + 4 * i);
                for (int h = 0; h < H; ++h) {
                    const __m256i pe = _mm256_maddubs_epi16(even[h], xe), po = _mm256_maddubs_epi16(odd[h], xo);
                    out[r][h] = i == 0 ? pe : _mm256_add_epi16(out[r][h], pe);
                    pin(out[r][h]);
                    out[r][h] = _mm256_add_epi16(out[r][h], po);
                    pin(out[r][h]);
                }
            }
        }
        const __m256i ones = _mm256_set1_epi16(1);
        for (int r = 0; r < R; ++r)
            for (int h = 0; h < H; ++h) out[r][h] = _mm256_madd_epi16(out[r][h], ones);
    }
};

template <int R, int H>
struct GroupSums<false, R, H> {
    static inline void run(const uint8_t* w, const int8_t* const* x, int k, __m256i (&out)[R][H]) {
        const __m256i ones = _mm256_set1_epi16(1);
#pragma GCC unroll 8
        for (int i = 0; i < 8; ++i) {
            for (int h = 0; h < H; ++h) {
                const __m256i bytes = load_bytes(w + i * 64 + h * 32);
                const __m256i magnitudes = _mm256_abs_epi8(bytes);  // -128 becomes 128: the unsigned side
                for (int r = 0; r < R; ++r) {
                    const __m256i x4 = broadcast4(x[r] + k + 4 * i);
                    const __m256i pairs = _mm256_maddubs_epi16(magnitudes, _mm256_sign_epi8(x4, bytes));
                    const __m256i sums = _mm256_madd_epi16(pairs, ones);
                    out[r][h] = i == 0 ? sums : _mm256_add_epi32(out[r][h], sums);
                    pin(out[r][h]);
                }
            }
        }
    }
};

// 8 columns of step I (4 k) of a group: integers as they are stored, or, of 8 bits and codebooks, with their sign.
template <WeightKind Kind, int I>
inline __m256i step_bytes(const uint8_t* w, int half) {
    using Format = IntFormat<Kind>;
    constexpr int kLow = Format::kLayout.low_bits, kHigh = Format::kLayout.high_bits;
    w += half * 32;
    if constexpr (kLow == 8) return load_bytes(w + I * 64);
    constexpr int kByte = kLow == 4 ? I % 4 : I / 4, kShift = kLow == 4 ? I / 4 * 4 : I % 4 * 2;
    const __m256i low = _mm256_set1_epi8((1 << kLow) - 1);
    __m256i q = _mm256_and_si256(_mm256_srli_epi16(load_bytes(w + kByte * 64), kShift), low);
    if constexpr (kHigh > 0) {
        constexpr int kPosition = kHigh == 1 ? I : I % 4 * 2;
        const __m256i plane = load_bytes(w + Format::kLowBytes + (kHigh == 1 ? 0 : I / 4) * 64);
        const __m256i moved = kPosition < kLow ? _mm256_slli_epi16(plane, kPosition < kLow ? kLow - kPosition : 0)
                                               : _mm256_srli_epi16(plane, kPosition < kLow ? 0 : kPosition - kLow);
        q = _mm256_or_si256(q, _mm256_and_si256(moved, _mm256_set1_epi8(((1 << kHigh) - 1) << kLow)));
    }
    if constexpr (Format::kLayout.codebook) {
        const __m128i levels = _mm_loadu_si128(reinterpret_cast<const __m128i*>(octavo::kCodeLevels));
        q = _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(levels), q);
    }
    return q;
}

// f<0>(), ..., f<N - 1>()
template <int N, class F>
inline void unrolled(const F& f) {
    if constexpr (N > 1) unrolled<N - 1>(f);
    f.template operator()<N - 1>();
}

// Exact sums of a part of one group for R rows and H halves, of the integers as stored. Unsigned ones add up in 16 bits
// for as many steps as fit: 8 of 4 bits and less, 4 of 5 bits (31 * 127 * 2 * 4 = 31496), 2 of 6 bits.
template <WeightKind Kind, int Part, int R, int H, bool Widened>
inline void part_sums(const uint8_t* w, const int8_t* const* x, int k, int half, __m256i (&out)[R][H]) {
    using Format = IntFormat<Kind>;
    constexpr int kSteps = 8 / Format::kParts, kBits = Format::kLayout.low_bits + Format::kLayout.high_bits;
    constexpr bool kSigned = kBits == 8 || Format::kLayout.codebook;
    constexpr int kFit = kSigned ? 1 : kBits == 6 ? 2 : kBits == 5 ? 4 : kSteps;
    const __m256i ones = _mm256_set1_epi16(1);
    unrolled<kSteps / kFit>([&]<int Run>() {
        __m256i pairs[R][H];
        unrolled<kFit>([&]<int J>() {
            constexpr int kStep = Part * kSteps + Run * kFit + J;
            __m256i bytes[H], magnitudes[H];
            for (int h = 0; h < H; ++h) {
                bytes[h] =
                    Widened ? load_bytes(w + kStep * 64 + (half + h) * 32) : step_bytes<Kind, kStep>(w, half + h);
                if (kSigned) magnitudes[h] = _mm256_abs_epi8(bytes[h]);
            }
            for (int r = 0; r < R; ++r) {
                const __m256i x4 = broadcast4(x[r] + k + 4 * kStep);
                for (int h = 0; h < H; ++h) {
                    const __m256i p = kSigned ? _mm256_maddubs_epi16(magnitudes[h], _mm256_sign_epi8(x4, bytes[h]))
                                              : _mm256_maddubs_epi16(bytes[h], x4);
                    pairs[r][h] = J == 0 ? p : _mm256_add_epi16(pairs[r][h], p);
                    pin(pairs[r][h]);
                }
            }
        });
        for (int r = 0; r < R; ++r) {
            for (int h = 0; h < H; ++h) {
                const __m256i sums = _mm256_madd_epi16(pairs[r][h], ones);
                out[r][h] = Run == 0 ? sums : _mm256_add_epi32(out[r][h], sums);
                pin(out[r][h]);
            }
        }
    });
}

inline __m256 eight_sub_scales(const uint8_t* p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}

// scale_of and minimum_of, of 8 columns.
template <WeightKind Kind>
inline __m256 half_scale(PackedGroup p, int part, int half) {
    if constexpr (!IntFormat<Kind>::kTwoLevel)
        return half_to_float(reinterpret_cast<const uint16_t*>(p.group) + half * 8);
    const __m256 d = _mm256_mul_ps(half_to_float(reinterpret_cast<const uint16_t*>(p.header) + half * 8),
                                   eight_sub_scales(p.group + part * kLanes + half * 8));
    return Kind == WeightKind::kInt8K ? _mm256_mul_ps(d, _mm256_set1_ps(0.125f)) : d;
}
template <WeightKind Kind>
inline __m256 half_minimum(PackedGroup p, int part, int half) {
    using Format = IntFormat<Kind>;
    if constexpr (Format::kMinusEight) return _mm256_mul_ps(half_scale<Kind>(p, 0, half), _mm256_set1_ps(-8.0f));
    const auto* halves = reinterpret_cast<const uint16_t*>(Format::kTwoLevel ? p.header : p.group) + kLanes + half * 8;
    if constexpr (!Format::kTwoLevel) return half_to_float(halves);
    return _mm256_mul_ps(half_to_float(halves),
                         eight_sub_scales(p.group + (Format::kParts + part) * kLanes + half * 8));
}

// Fetch: nobody has read the panel yet, and the hardware's prefetcher stops at every page.
template <WeightKind Kind, int R, int H, bool Fetch, bool Widened = false>
void int_tile(const LinearTask& t, int row, int panel, int half, const WideGroups<Kind>* wide = nullptr) {
    using Format = IntFormat<Kind>;
    constexpr int kParts = Format::kParts;
    const int groups = t.w->cols / kGroup, first = Widened ? wide->first : 0, end = Widened ? wide->end : groups;
    GroupWalk<Kind> w(t.w->data + panel * t.w->panel_stride, first);
    float* out = t.out + (row - t.row_begin) * t.out_stride + (panel - t.panel_begin) * kLanes + half * 8;
    IntRow rows[R];
    const int8_t* x[R];
    const float *scale[R], *sum[R];
    __m256 acc[R][H];
    for (int r = 0; r < R; ++r) {
        rows[r] = IntRow(t.q, row + r, groups);
        x[r] = rows[r].q;
        scale[r] = rows[r].scale;
        sum[r] = rows[r].sum;
        for (int h = 0; h < H; ++h)
            acc[r][h] = Widened && first ? _mm256_loadu_ps(out + r * t.out_stride + h * 8) : _mm256_setzero_ps();
    }
    for (int g = first; g < end; ++g) {
        w.move_to(g);
        if (Fetch)
            for (int line = 0; line < Format::kGroupBytes; line += 64)
                _mm_prefetch(reinterpret_cast<const char*>(w.at.group + kPrefetchBytes + line), _MM_HINT_T0);
        if constexpr (Format::kPlain) {
            __m256i products[R][H];
            GroupSums<Format::kNibbles, R, H>::run(w.integers() + half * 32, x, g * kGroup, products);
            for (int h = 0; h < H; ++h) {
                const __m256 d = half_scale<Kind>(w.at, 0, half + h);
                const __m256 m = Format::kHasOffset ? half_minimum<Kind>(w.at, 0, half + h) : d;
                for (int r = 0; r < R; ++r) {
                    const __m256 scaled =
                        _mm256_mul_ps(_mm256_cvtepi32_ps(products[r][h]), _mm256_set1_ps(scale[r][g]));
                    acc[r][h] = _mm256_fmadd_ps(scaled, d, acc[r][h]);
                    if (Format::kHasOffset) acc[r][h] = _mm256_fmadd_ps(_mm256_set1_ps(sum[r][g]), m, acc[r][h]);
                }
            }
            continue;
        }
        unrolled<kParts>([&]<int Part>() {
            __m256i products[R][H];
            part_sums<Kind, Part, R, H, Widened>(Widened ? wide->integers[g - first] : w.integers(), x, g * kGroup,
                                                 half, products);
            for (int h = 0; h < H; ++h) {
                const __m256 d = Widened ? _mm256_loadu_ps(wide->scales[g - first][Part] + (half + h) * 8)
                                         : half_scale<Kind>(w.at, Part, half + h);
                for (int r = 0; r < R; ++r) {
                    if (Format::kZero)
                        products[r][h] = _mm256_sub_epi32(
                            products[r][h], _mm256_set1_epi32(Format::kZero * rows[r].part_total(kParts, Part, g)));
                    const __m256 scaled =
                        _mm256_mul_ps(_mm256_cvtepi32_ps(products[r][h]), _mm256_set1_ps(rows[r].scale[g]));
                    acc[r][h] = _mm256_fmadd_ps(scaled, d, acc[r][h]);
                }
            }
        });
        if constexpr (Format::kHasOffset) {
            for (int part = 0; part < kParts; ++part) {
                for (int h = 0; h < H; ++h) {
                    const __m256 m = Widened ? _mm256_loadu_ps(wide->minima[g - first][part] + (half + h) * 8)
                                             : half_minimum<Kind>(w.at, part, half + h);
                    for (int r = 0; r < R; ++r)
                        acc[r][h] = _mm256_fmadd_ps(_mm256_set1_ps(rows[r].part_sum(kParts, part, g)), m, acc[r][h]);
                }
            }
        }
    }
    for (int r = 0; r < R; ++r)
        for (int h = 0; h < H; ++h) _mm256_storeu_ps(out + r * t.out_stride + h * 8, acc[r][h]);
}

template <WeightKind Kind>
void many_rows(const LinearTask& t, int panel) {
    WideGroups<Kind> wide;
    const int groups = t.w->cols / kGroup;
    for (wide.first = 0; wide.first < groups; wide.first += kWideGroups) {
        wide.end = wide.first + kWideGroups < groups ? wide.first + kWideGroups : groups;
        GroupWalk<Kind> w(t.w->data + panel * t.w->panel_stride, wide.first);
        for (int g = wide.first; g < wide.end; ++g) {
            w.move_to(g);
            for (int line = 0; line < IntFormat<Kind>::kGroupBytes; line += 64)
                _mm_prefetch(reinterpret_cast<const char*>(w.at.group + kPrefetchBytes + line), _MM_HINT_T0);
            uint8_t* to = wide.integers[g - wide.first];
            unrolled<8>([&]<int I>() {
                for (int half = 0; half < 2; ++half)
                    _mm256_store_si256(reinterpret_cast<__m256i*>(to + I * 64 + half * 32),
                                       step_bytes<Kind, I>(w.integers(), half));
            });
            wide.widen_scales(w.at, g);
        }
        int row = t.row_begin;
        for (; row + 4 <= t.row_end; row += 4)
            for (int half = 0; half < 2; ++half) int_tile<Kind, 4, 1, false, true>(t, row, panel, half, &wide);
        for (; row < t.row_end; ++row) int_tile<Kind, 1, 2, false, true>(t, row, panel, 0, &wide);
    }
}

// Few rows stream whole panels from memory; many rows take half a panel at a time, which the first pass left in L1.
template <WeightKind Kind>
void linear_int(const LinearTask& t) {
    for (int panel = t.panel_begin; panel < t.panel_end; ++panel) {
        if constexpr (widens_for_many<Kind>()) {
            if (t.row_end - t.row_begin >= kManyRows) {
                many_rows<Kind>(t, panel);
                continue;
            }
        }
        int row = t.row_begin;
        for (; row + 4 <= t.row_end; row += 4) {
            row == t.row_begin ? int_tile<Kind, 4, 1, true>(t, row, panel, 0)
                               : int_tile<Kind, 4, 1, false>(t, row, panel, 0);
            int_tile<Kind, 4, 1, false>(t, row, panel, 1);
        }
        for (; row + 2 <= t.row_end; row += 2) int_tile<Kind, 2, 2, true>(t, row, panel, 0);
        if (row < t.row_end) int_tile<Kind, 1, 2, true>(t, row, panel, 0);
    }
}

}  // namespace
