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

// Fetch: nobody has read the panel yet, and the hardware's prefetcher stops at every page.
template <WeightKind Kind, int R, int H, bool Fetch>
void int_tile(const LinearTask& t, int row, int panel, int half) {
    using Format = IntFormat<Kind>;
    const int groups = t.w->cols / kGroup;
    const uint8_t* w = t.w->data + panel * t.w->panel_stride;
    const int8_t* x[R];
    const float *scale[R], *sum[R];
    for (int r = 0; r < R; ++r) {
        x[r] = t.q.q + (row + r) * t.q.cols;
        scale[r] = t.q.scale + (row + r) * groups;
        sum[r] = t.q.sum + (row + r) * groups;
    }
    __m256 acc[R][H];
    for (int r = 0; r < R; ++r)
        for (int h = 0; h < H; ++h) acc[r][h] = _mm256_setzero_ps();
    for (int g = 0; g < groups; ++g, w += Format::kGroupBytes) {
        if (Fetch)
            for (int line = 0; line < Format::kGroupBytes; line += 64)
                _mm_prefetch(reinterpret_cast<const char*>(w + kPrefetchBytes + line), _MM_HINT_T0);
        __m256i products[R][H];
        GroupSums<Format::kNibbles, R, H>::run(w + Format::kScaleBytes + half * 32, x, g * kGroup, products);
        for (int h = 0; h < H; ++h) {
            const uint16_t* scales = reinterpret_cast<const uint16_t*>(w) + (half + h) * 8;
            const __m256 d = half_to_float(scales);
            const __m256 m =
                Format::kHasMinimum ? half_to_float(scales + kLanes) : _mm256_mul_ps(d, _mm256_set1_ps(-8.0f));
            for (int r = 0; r < R; ++r) {
                const __m256 scaled = _mm256_mul_ps(_mm256_cvtepi32_ps(products[r][h]), _mm256_set1_ps(scale[r][g]));
                acc[r][h] = _mm256_fmadd_ps(scaled, d, acc[r][h]);
                if (Format::kNibbles) acc[r][h] = _mm256_fmadd_ps(_mm256_set1_ps(sum[r][g]), m, acc[r][h]);
            }
        }
    }
    for (int r = 0; r < R; ++r) {
        float* out = t.out + (row + r - t.row_begin) * t.out_stride + (panel - t.panel_begin) * kLanes + half * 8;
        for (int h = 0; h < H; ++h) _mm256_storeu_ps(out + h * 8, acc[r][h]);
    }
}

// Few rows stream whole panels from memory; many rows take half a panel at a time, which the first pass left in L1.
template <WeightKind Kind>
void linear_int(const LinearTask& t) {
    for (int panel = t.panel_begin; panel < t.panel_end; ++panel) {
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
