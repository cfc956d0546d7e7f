// Products with float weights: f32, f16, bf16. Include one of simd/*.h first.
//
// Numerics: out[row][n] = one fma chain over k ascending from 0, in float32, whatever the number of rows.
#pragma once

#include "types.h"

namespace {

// The weights of kStep k that lie together, [k / kStep][16][kStep].
struct LoadF32 {
    using Element = float;
    static constexpr int kStep = 1;
    static void at(const float* p, Vec (&w)[kStep]) { w[0] = load(p); }
};
struct LoadF16 {
    using Element = uint16_t;
    static constexpr int kStep = 1;
    static void at(const uint16_t* p, Vec (&w)[kStep]) { w[0] = load_f16(p); }
};
struct LoadBf16 {
    using Element = uint16_t;
    static constexpr int kStep = 2;
    static void at(const uint16_t* p, Vec (&w)[kStep]) { load_bf16_pairs(p, w[0], w[1]); }
};

// R rows times P neighbouring panels: R * P independent chains hide the latency of fma.
template <class Load, int R, int P>
void float_tile(const octavo::LinearTask& t, int row, int panel) {
    using Element = typename Load::Element;
    const float* x[R];
    for (int r = 0; r < R; ++r) x[r] = t.x.data + (row + r) * t.x.stride;
    const Element* w[P];
    for (int p = 0; p < P; ++p) w[p] = reinterpret_cast<const Element*>(t.w->data + (panel + p) * t.w->panel_stride);
    Vec acc[R][P];
    for (int r = 0; r < R; ++r)
        for (int p = 0; p < P; ++p) acc[r][p] = zero();
    const int whole = t.w->cols / Load::kStep * Load::kStep;
    const auto step = [&](int k, int count) {
        for (int p = 0; p < P; ++p) {
            Vec wk[Load::kStep];
            Load::at(w[p] + k * kLanes, wk);
            for (int i = 0; i < count; ++i)
                for (int r = 0; r < R; ++r) acc[r][p] = fma(set1(x[r][k + i]), wk[i], acc[r][p]);
        }
    };
    for (int k = 0; k < whole; k += Load::kStep) step(k, Load::kStep);
    if (whole < t.w->cols) step(whole, t.w->cols - whole);
    for (int r = 0; r < R; ++r)
        for (int p = 0; p < P; ++p)
            store(t.out + (row + r - t.row_begin) * t.out_stride + (panel + p - t.panel_begin) * kLanes, acc[r][p]);
}

// Panels that a tile of R rows takes: enough chains, in 16 or 32 registers.
constexpr int panels_of(int rows) { return rows == 1 ? 4 : rows == 2 || kRegisters >= 32 ? 2 : 1; }

// R rows over the panels [begin, end).
template <class Load, int R>
void float_rows(const octavo::LinearTask& t, int row, int begin, int end) {
    constexpr int P = panels_of(R);
    int p = begin;
    for (; p + P <= end; p += P) float_tile<Load, R, P>(t, row, p);
    for (; p < end; ++p) float_tile<Load, R, 1>(t, row, p);
}

// The last rows, R of them or fewer.
template <class Load, int R>
void float_rest(const octavo::LinearTask& t, int row, int begin, int end) {
    if constexpr (R > 0) {
        if (t.row_end - row == R)
            float_rows<Load, R>(t, row, begin, end);
        else
            float_rest<Load, R - 1>(t, row, begin, end);
    }
}

// Bytes of weights that all rows meet before the next are looked at: they stay in the L2 cache, and come from memory
// once.
constexpr size_t kFloatGroupBytes = 512 << 10;

template <class Load>
void linear_float(const octavo::LinearTask& t) {
    const size_t fit = kFloatGroupBytes / t.w->panel_stride;
    const int group = fit < 4 ? 4 : static_cast<int>(fit) / 4 * 4;
    for (int begin = t.panel_begin; begin < t.panel_end; begin += group) {
        const int end = begin + group < t.panel_end ? begin + group : t.panel_end;
        int row = t.row_begin;
        for (; row + 6 <= t.row_end; row += 6) float_rows<Load, 6>(t, row, begin, end);
        float_rest<Load, 5>(t, row, begin, end);
    }
}

}  // namespace
