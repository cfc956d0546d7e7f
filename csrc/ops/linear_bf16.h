// Products in bfloat16, the arithmetic of AMX tiles written out. Include one of simd/*.h first.
//
// Numerics: activations and dequantised weights (ops/dequantise.h) are rounded to bfloat16, to nearest even. For each
// 32 k, ascending, the last ones padded with zeros:
//   even = one fma chain over the even k from 0, odd = the same over the odd k, in float32
//   acc += even + odd
// This is what TDPBF16PS computes, so amx/linear_bf16.h agrees bit for bit.
#pragma once

#include "stored_integer.h"

namespace {

// 32 k of 16 columns as float32 that are bfloat16 numbers: [k][column].
using GroupFloats = float[octavo::kGroup][kLanes];

// Group g of a panel.
template <octavo::WeightKind Kind>
void unpack_bf16(const uint8_t* panel, int g, GroupFloats& out) {
    if constexpr (Kind == octavo::WeightKind::kBf16) {
        const auto* words = reinterpret_cast<const uint16_t*>(panel) + g * octavo::kGroup * kLanes;
        for (int k = 0; k < octavo::kGroup; k += 2) {
            Vec even, odd;
            load_bf16_pairs(words + k * kLanes, even, odd);
            store(out[k], even);
            store(out[k + 1], odd);
        }
    } else {
        using Format = IntFormat<Kind>;
        constexpr int kPartK = octavo::kGroup / Format::kParts;
        const PackedGroup at = group_at<Kind>(panel, g);
        for (int part = 0; part < Format::kParts; ++part) {
            const Vec d = scale_of<Kind>(at, part), m = minimum_of<Kind>(at, part);
            for (int k = part * kPartK; k < (part + 1) * kPartK; ++k) {
                float q[kLanes];
                for (int column = 0; column < kLanes; ++column)
                    q[column] = static_cast<float>(stored_integer<Kind>(at.group + Format::kScaleBytes, k, column));
                store(out[k], round_to_bf16(Format::kHasOffset ? fma(load(q), d, m) : mul(load(q), d)));
            }
        }
    }
}

template <octavo::WeightKind Kind>
constexpr int kBf16GroupBytes = IntFormat<Kind>::kGroupBytes;
template <>
constexpr int kBf16GroupBytes<octavo::WeightKind::kBf16> = octavo::kGroup * kLanes * 2;

// acc[r] += 32 k of R rows times 16 columns.
template <int R>
inline void add_bf16_group(const octavo::Quantised& x, int row, int group, const GroupFloats& w, float (*acc)[kLanes]) {
    float rows[R][octavo::kGroup];
    Vec even[R], odd[R];
    for (int r = 0; r < R; ++r) {
        const uint16_t* words = x.tiles + tile_offset(x, static_cast<size_t>(row + r), static_cast<size_t>(group));
        store(rows[r], load_bf16(words));
        store(rows[r] + kLanes, load_bf16(words + kLanes));
        even[r] = odd[r] = zero();
    }
    for (int k = 0; k < octavo::kGroup; k += 2) {
        const Vec w_even = load(w[k]), w_odd = load(w[k + 1]);
        for (int r = 0; r < R; ++r) {
            even[r] = fma(set1(rows[r][k]), w_even, even[r]);
            odd[r] = fma(set1(rows[r][k + 1]), w_odd, odd[r]);
        }
    }
    for (int r = 0; r < R; ++r) store(acc[r], add(load(acc[r]), add(even[r], odd[r])));
}

template <octavo::WeightKind Kind>
void linear_bf16(const octavo::LinearTask& t) {
    GroupFloats weights;
    float acc[octavo::kMaxLinearRows][kLanes];
    const int rows = t.row_end - t.row_begin, groups = (t.w->cols + octavo::kGroup - 1) / octavo::kGroup;
    for (int panel = t.panel_begin; panel < t.panel_end; ++panel) {
        const uint8_t* w = t.w->data + panel * t.w->panel_stride;
        for (int r = 0; r < rows; ++r) store(acc[r], zero());
        for (int g = 0; g < groups; ++g) {
            unpack_bf16<Kind>(w, g, weights);
            int r = 0;
            for (; r + 3 <= rows; r += 3) add_bf16_group<3>(t.q, t.row_begin + r, g, weights, acc + r);
            for (; r < rows; ++r) add_bf16_group<1>(t.q, t.row_begin + r, g, weights, acc + r);
        }
        for (int r = 0; r < rows; ++r) store(t.out + r * t.out_stride + (panel - t.panel_begin) * kLanes, load(acc[r]));
    }
}

}  // namespace
