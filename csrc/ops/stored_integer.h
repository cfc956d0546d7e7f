// One weight of a packed group, where speed does not matter. Include one of simd/*.h first.
#pragma once

#include "linear_int.h"

namespace {

// Weight k of a column: the integer that is multiplied by d. w: the group's integers.
template <octavo::WeightKind Kind>
inline int stored_integer(const uint8_t* w, int k, int column) {
    using Format = IntFormat<Kind>;
    constexpr int kLow = Format::kLayout.low_bits, kHigh = Format::kLayout.high_bits;
    const int step = k / 4, at = column * 4 + k % 4;
    const auto plane = [step, at](const uint8_t* p, int bits, int steps) {  // steps: that a byte holds
        const int bytes = 8 / steps, byte = bits == 4 ? step % 4 : step / steps,
                  position = bits == 4 ? step / 4 : step % steps;
        return bytes ? p[byte * 64 + at] >> (bits * position) & ((1 << bits) - 1) : 0;
    };
    if constexpr (kLow == 8) {
        return static_cast<int8_t>(w[step * 64 + at]);
    } else {
        int q = plane(w, kLow, 8 / kLow);
        if constexpr (kHigh > 0) q |= plane(w + Format::kLowBytes, kHigh, 8 / kHigh) << kLow;
        return Format::kLayout.codebook ? octavo::kCodeLevels[q & 15] : q - Format::kZero;
    }
}

}  // namespace
