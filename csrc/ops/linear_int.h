// The float half of products with integer weights, which fixes their numerics. Include one of simd/*.h first.
//
// Numerics: activations are quantised per row and group of 32 (x = s * q). For each group, ascending, with the exact
// integer sum i = sum q_w q_x:
//   acc = fma(float(i) * s, d, acc)         and, where the weights have a minimum or a zero point,
//   acc = fma(s * sum q_x, m, acc)          with m the minimum, or -8 d
// Weights with a scale per 16 have two such sums: first both products, then both minima, the lower half first.
// Scales of two levels are multiplied first, d = f16 * sub-scale, which is exact; so are zero points other than 8,
// which are part of i. The integer half differs by ISA and is exact in each, so all of them agree bit for bit.
#pragma once

#include "int_layout.h"

namespace {

template <octavo::WeightKind Kind>
struct IntFormat {
    static constexpr octavo::IntLayout kLayout = octavo::int_layout(Kind);
    static constexpr bool kNibbles = kLayout.low_bits == 4 && kLayout.high_bits == 0 && !kLayout.codebook;
    static constexpr bool kPlain = Kind <= octavo::WeightKind::kInt4Z;  // f16 scales, whole bytes or nibbles
    static constexpr bool kMinusEight = Kind == octavo::WeightKind::kInt4Z;
    static constexpr bool kHasMinimum = kLayout.has_minimum;
    static constexpr bool kHasOffset = kHasMinimum || kMinusEight;  // w = d q + m with m other than 0
    static constexpr bool kTwoLevel = kLayout.two_level;
    static constexpr int kParts = kLayout.parts;
    static constexpr int kZero = kMinusEight ? 0 : kLayout.zero;  // that the integer sums take off
    static constexpr int kLowBytes = octavo::low_bytes(kLayout);
    static constexpr int kHeaderBytes = octavo::header_bytes(kLayout);
    static constexpr int kScaleBytes = octavo::scale_bytes(kLayout);  // before the group's integers
    static constexpr int kGroupBytes = octavo::group_bytes(kLayout);
};

// A group and the header that it belongs to.
struct PackedGroup {
    const uint8_t* header;
    const uint8_t* group;
};

// In constants of the kind, not through octavo::group_offset: GCC calls that at run time, for every tile.
template <octavo::WeightKind Kind>
inline PackedGroup group_at(const uint8_t* panel, int g) {
    using Format = IntFormat<Kind>;
    const auto group = static_cast<size_t>(g);
    if constexpr (!Format::kTwoLevel) {
        const uint8_t* at = panel + group * Format::kGroupBytes;
        return {at, at};
    }
    constexpr size_t kSpan = Format::kHeaderBytes + octavo::kHeaderGroups * Format::kGroupBytes;
    const uint8_t* header = panel + group / octavo::kHeaderGroups * kSpan;
    return {header, header + Format::kHeaderBytes + group % octavo::kHeaderGroups * Format::kGroupBytes};
}

// Steps through the groups of a panel.
template <octavo::WeightKind Kind>
struct GroupWalk {
    using Format = IntFormat<Kind>;

    PackedGroup at;
    const uint8_t* next;

    // first: the group that move_to is called with first, a multiple of eight.
    explicit GroupWalk(const uint8_t* panel, int first = 0)
        : at{panel, panel}, next(group_at<Kind>(panel, first).header) {}
    // To group g, which follows the last one.
    void move_to(int g) {
        if constexpr (Format::kTwoLevel) {
            if (g % octavo::kHeaderGroups == 0) {
                at.header = next;
                next += Format::kHeaderBytes;
            }
        }
        at.group = next;
        next += Format::kGroupBytes;
    }
    const uint8_t* integers() const { return at.group + Format::kScaleBytes; }
};

// Whether many rows read some groups from where they have been widened: integers to bytes [group][8][16][4], scales and
// minima to floats [group][part][16]. Taking planes apart and multiplying two levels costs more than the product of a
// few rows.
template <octavo::WeightKind Kind>
constexpr bool widens_for_many() {
    return !IntFormat<Kind>::kPlain;
}
constexpr int kWideGroups = 16;  // at a time: 8 KB, which stay in L1

// Scale of a part of a group, and its minimum.
template <octavo::WeightKind Kind>
inline Vec scale_of(PackedGroup p, int part) {
    if constexpr (!IntFormat<Kind>::kTwoLevel) return load_f16(reinterpret_cast<const uint16_t*>(p.group));
    const Vec sub = load_i8(reinterpret_cast<const int8_t*>(p.group) + part * kLanes);
    const Vec d = mul(load_f16(reinterpret_cast<const uint16_t*>(p.header)), sub);
    return Kind == octavo::WeightKind::kInt8K ? mul(d, set1(0.125f)) : d;
}
template <octavo::WeightKind Kind>
inline Vec minimum_of(PackedGroup p, int part) {
    using Format = IntFormat<Kind>;
    if constexpr (Format::kMinusEight) return mul(scale_of<Kind>(p, 0), set1(-8.0f));
    if constexpr (!Format::kHasMinimum) return zero();
    if constexpr (!Format::kTwoLevel) return load_f16(reinterpret_cast<const uint16_t*>(p.group) + kLanes);
    const Vec sub = load_i8(reinterpret_cast<const int8_t*>(p.group) + (Format::kParts + part) * kLanes);
    return mul(load_f16(reinterpret_cast<const uint16_t*>(p.header) + kLanes), sub);
}

// Groups [first, end) of a panel, widened; the sums of those before are in the result.
template <octavo::WeightKind Kind>
struct WideGroups {
    static constexpr int kParts = IntFormat<Kind>::kParts;

    int first, end;
    alignas(64) uint8_t integers[kWideGroups][octavo::kGroup * kLanes];
    float scales[kWideGroups][kParts][kLanes], minima[kWideGroups][kParts][kLanes];

    void widen_scales(PackedGroup from, int g) {
        for (int part = 0; part < kParts; ++part) {
            store(scales[g - first][part], scale_of<Kind>(from, part));
            if (IntFormat<Kind>::kHasOffset) store(minima[g - first][part], minimum_of<Kind>(from, part));
        }
    }
};

// The activations of one row.
struct IntRow {
    const int8_t* q;
    const float *scale, *sum;
    const int32_t *total, *low;

    IntRow() = default;
    IntRow(const octavo::Quantised& x, int row, int groups)
        : q(x.q + static_cast<size_t>(row) * x.cols),
          scale(x.scale + static_cast<size_t>(row) * groups),
          sum(x.sum + static_cast<size_t>(row) * groups),
          total(x.total + static_cast<size_t>(row) * groups),
          low(x.low + (x.low ? static_cast<size_t>(row) * groups : 0)) {}
    // Of the activations of a part of a group.
    int32_t part_total(int parts, int part, int g) const {
        return parts == 1 ? total[g] : part == 0 ? low[g] : total[g] - low[g];
    }
    float part_sum(int parts, int part, int g) const {
        return parts == 1 ? sum[g] : scale[g] * static_cast<float>(part_total(parts, part, g));
    }
};

}  // namespace
