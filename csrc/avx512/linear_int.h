// Products with int8 and int4 weights by AVX-512 VNNI. Numerics: ops/linear_int.h.
//
// vpdpbusd multiplies unsigned by signed bytes: nibbles are unsigned as they are; int8 weights are shifted by 128, and
// every sum starts at -128 times the sum of the activations instead of 0. A lane holds one column and 4 values of k.
#pragma once

#include "step_bytes.h"

namespace {

using octavo::kGroup;
using octavo::LinearTask;
using octavo::WeightKind;

constexpr int kPrefetchBytes = 4096;  // a panel or so ahead: the hardware's prefetcher stops at every page
constexpr int kManyRows = 32;         // from which on widening was measured to be faster

inline __m512i load_bytes(const void* p) { return _mm512_loadu_si512(p); }
inline __m512i broadcast4(const int8_t* p) {
    int32_t four;
    __builtin_memcpy(&four, p, 4);
    return _mm512_set1_epi32(four);
}

// Exact sums of one group: sixteen columns for R rows. Two chains per row hide the latency of vpdpbusd.
template <bool Nibbles, int R>
inline void group_sums(const uint8_t* w, const int8_t* const* x, int k, const int32_t* const* total, int group,
                       __m512i (&out)[R]) {
    __m512i second[R];
    for (int r = 0; r < R; ++r) {
        out[r] = Nibbles ? _mm512_setzero_si512() : _mm512_set1_epi32(-128 * total[r][group]);
        second[r] = _mm512_setzero_si512();
    }
    const __m512i low = _mm512_set1_epi8(15), sign = _mm512_set1_epi8(static_cast<char>(0x80));
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        __m512i lower, upper;
        if (Nibbles) {
            const __m512i bytes = load_bytes(w + i * 64);
            lower = _mm512_and_si512(bytes, low);
            upper = _mm512_and_si512(_mm512_srli_epi16(bytes, 4), low);
        } else {
            lower = _mm512_xor_si512(load_bytes(w + i * 64), sign);
            upper = _mm512_xor_si512(load_bytes(w + (4 + i) * 64), sign);
        }
        for (int r = 0; r < R; ++r) {
            out[r] = _mm512_dpbusd_epi32(out[r], lower, broadcast4(x[r] + k + 4 * i));
            second[r] = _mm512_dpbusd_epi32(second[r], upper, broadcast4(x[r] + k + 16 + 4 * i));
        }
    }
    for (int r = 0; r < R; ++r) out[r] = _mm512_add_epi32(out[r], second[r]);
}

// Exact sums of both halves of a group for R rows, zero points taken off.
template <WeightKind Kind, int R, bool Widened>
inline void half_sums(const uint8_t* w, const IntRow (&rows)[R], int g, __m512i (&lower)[R], __m512i (&upper)[R]) {
    using Format = IntFormat<Kind>;
    constexpr int kZero = unsigned_zero<Kind>();
    for (int r = 0; r < R; ++r) {
        if (Format::kParts == 2) {
            lower[r] = kZero ? _mm512_set1_epi32(-kZero * rows[r].low[g]) : _mm512_setzero_si512();
            upper[r] = kZero ? _mm512_set1_epi32(-kZero * (rows[r].total[g] - rows[r].low[g])) : _mm512_setzero_si512();
        } else {
            lower[r] = kZero ? _mm512_set1_epi32(-kZero * rows[r].total[g]) : _mm512_setzero_si512();
            upper[r] = _mm512_setzero_si512();
        }
    }
    steps<4>([&]<int I>() {
        const __m512i first = Widened ? load_bytes(w + I * 64) : unsigned_bytes<Kind, I>(w);
        const __m512i second = Widened ? load_bytes(w + (I + 4) * 64) : unsigned_bytes<Kind, I + 4>(w);
        for (int r = 0; r < R; ++r) {
            const int8_t* x = rows[r].q + g * kGroup + 4 * I;
            lower[r] = _mm512_dpbusd_epi32(lower[r], first, broadcast4(x));
            upper[r] = _mm512_dpbusd_epi32(upper[r], second, broadcast4(x + 16));
        }
    });
}

// Fetch: nobody has read the panel yet.
template <WeightKind Kind, int R, bool Fetch, bool Widened = false>
void int_tile(const LinearTask& t, int row, int panel, const WideGroups<Kind>* wide = nullptr) {
    using Format = IntFormat<Kind>;
    const int groups = t.w->cols / kGroup, first = Widened ? wide->first : 0, end = Widened ? wide->end : groups;
    GroupWalk<Kind> w(t.w->data + panel * t.w->panel_stride, first);
    float* out = t.out + (row - t.row_begin) * t.out_stride + (panel - t.panel_begin) * kLanes;
    IntRow rows[R];
    Vec acc[R];
    for (int r = 0; r < R; ++r) {
        rows[r] = IntRow(t.q, row + r, groups);
        acc[r] = Widened && first ? load(out + r * t.out_stride) : zero();
    }
    for (int g = first; g < end; ++g) {
        w.move_to(g);
        if (Fetch)
            for (int line = 0; line < Format::kGroupBytes; line += 64)
                _mm_prefetch(reinterpret_cast<const char*>(w.at.group + kPrefetchBytes + line), _MM_HINT_T0);
        __m512i lower[R], upper[R];
        if constexpr (Format::kPlain) {
            const int8_t* x[R];
            const int32_t* total[R];
            for (int r = 0; r < R; ++r) {
                x[r] = rows[r].q;
                total[r] = rows[r].total;
            }
            group_sums<Format::kNibbles, R>(w.integers(), x, g * kGroup, total, g, lower);
        } else {
            half_sums<Kind, R, Widened>(Widened ? wide->integers[g - first] : w.integers(), rows, g, lower, upper);
        }
        if (!Format::kPlain && Format::kParts == 1)
            for (int r = 0; r < R; ++r) lower[r] = _mm512_add_epi32(lower[r], upper[r]);
        const Vec d = Widened ? load(wide->scales[g - first][0]) : scale_of<Kind>(w.at, 0);
        for (int r = 0; r < R; ++r) acc[r] = fma(mul(to_float(lower[r]), set1(rows[r].scale[g])), d, acc[r]);
        if constexpr (Format::kParts == 2) {
            const Vec d_upper = Widened ? load(wide->scales[g - first][1]) : scale_of<Kind>(w.at, 1);
            for (int r = 0; r < R; ++r) acc[r] = fma(mul(to_float(upper[r]), set1(rows[r].scale[g])), d_upper, acc[r]);
        }
        for (int part = 0; Format::kHasOffset && part < Format::kParts; ++part) {
            const Vec m = Widened ? load(wide->minima[g - first][part]) : minimum_of<Kind>(w.at, part);
            for (int r = 0; r < R; ++r) acc[r] = fma(set1(rows[r].part_sum(Format::kParts, part, g)), m, acc[r]);
        }
    }
    for (int r = 0; r < R; ++r) store(out + r * t.out_stride, acc[r]);
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
            steps<8>([&]<int I>() { _mm512_storeu_si512(to + I * 64, unsigned_bytes<Kind, I>(w.integers())); });
            wide.widen_scales(w.at, g);
        }
        int row = t.row_begin;
        for (; row + 8 <= t.row_end; row += 8) int_tile<Kind, 8, false, true>(t, row, panel, &wide);
        for (; row + 2 <= t.row_end; row += 2) int_tile<Kind, 2, false, true>(t, row, panel, &wide);
        if (row < t.row_end) int_tile<Kind, 1, false, true>(t, row, panel, &wide);
    }
}

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
        for (; row + 8 <= t.row_end; row += 8)  // 28 of 32 registers
            row == t.row_begin ? int_tile<Kind, 8, true>(t, row, panel) : int_tile<Kind, 8, false>(t, row, panel);
        for (; row + 4 <= t.row_end; row += 4) int_tile<Kind, 4, true>(t, row, panel);
        for (; row + 2 <= t.row_end; row += 2) int_tile<Kind, 2, true>(t, row, panel);
        if (row < t.row_end) int_tile<Kind, 1, true>(t, row, panel);
    }
}

}  // namespace
