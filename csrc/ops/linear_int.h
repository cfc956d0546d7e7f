// The float half of products with integer weights, which fixes their numerics. Include one of simd/*.h first.
//
// Numerics: activations are quantised per row and group of 32 (x = s * q). For each group, ascending, with the exact
// integer sum i = sum q_w q_x:
//   acc = fma(float(i) * s, d, acc)         and, where the weights have a minimum or a zero point,
//   acc = fma(s * sum q_x, m, acc)          with m the minimum, or -8 d
// The integer half differs by ISA and is exact in each, so all of them agree bit for bit.
#pragma once

#include "types.h"

namespace {

template <octavo::WeightKind Kind>
struct IntFormat {
    static constexpr bool kNibbles = Kind != octavo::WeightKind::kInt8;
    static constexpr bool kHasMinimum = Kind == octavo::WeightKind::kInt4;
    static constexpr int kScaleBytes = (kHasMinimum ? 4 : 2) * octavo::kPanel;  // before the group's integers
    static constexpr int kGroupBytes = kScaleBytes + octavo::kGroup * octavo::kPanel / (kNibbles ? 2 : 1);
};

}  // namespace
