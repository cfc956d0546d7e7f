// How the integers and scales of each packed kind lie. Plain constants: included by baseline code and by kernels.
//
// A panel is groups of 32 k, 16 columns each. Kinds with two levels of scales have a header before every eight groups:
//   header  [16] f16 d, [16] f16 minimum (the file's, negated)
//   group   scales: [16] f16 d, [16] f16 minimum, or [parts][16] int8 sub-scales, [parts][16] int8 sub-minima
//           low bits of the integers, high bits of the integers
// A step is 4 k: in each lane (column) 4 bytes, as dot products of bytes want them. With k = 4 step + j:
//   8 bits   [8][16][4] bytes, one per step
//   4 bits   [4][16][4]: byte [i][column][j] has step i low, step i + 4 high
//   2 bits   [2][16][4]: byte [i][column][j] has steps 4 i, 4 i + 1, ... from its lowest bits up
//   1 bit    [16][4]: byte [column][j] has step 0, 1, ... from its lowest bit up
// So a step is a load, a shift and a mask per plane, in registers of any width.
#pragma once

#include "types.h"

namespace octavo {

struct IntLayout {
    int low_bits;      // 8, 4 or 2
    int high_bits;     // 0, 1 or 2: of the second plane
    int zero;          // w = d * (q - zero); 8 bits are signed
    int parts;         // scales per group of 32
    bool has_minimum;  // w = d * q + m
    bool two_level;
    bool codebook;  // q are indices of kCodeLevels
};

constexpr int kHeaderGroups = 8;

static constexpr IntLayout int_layout(WeightKind kind) {
    switch (kind) {
        case WeightKind::kInt8:
            return {8, 0, 0, 1, false, false, false};
        case WeightKind::kInt4:
            return {4, 0, 0, 1, true, false, false};
        case WeightKind::kInt4Z:
            return {4, 0, 8, 1, false, false, false};
        case WeightKind::kInt5:
            return {4, 1, 0, 1, true, false, false};
        case WeightKind::kInt5Z:
            return {4, 1, 16, 1, false, false, false};
        case WeightKind::kInt2K:
            return {2, 0, 0, 2, true, true, false};
        case WeightKind::kInt3K:
            return {2, 1, 4, 2, false, true, false};
        case WeightKind::kInt4K:
            return {4, 0, 0, 1, true, true, false};
        case WeightKind::kInt5K:
            return {4, 1, 0, 1, true, true, false};
        case WeightKind::kInt6K:
            return {4, 2, 32, 2, false, true, false};
        case WeightKind::kInt8K:
            return {8, 0, 0, 2, false, true, false};
        case WeightKind::kCode4:
            return {4, 0, 0, 1, false, false, true};
        case WeightKind::kCode4K:
            return {4, 0, 0, 1, false, true, true};
        default:
            return {};
    }
}

static constexpr int low_bytes(const IntLayout& l) { return kGroup * kPanel / 8 * l.low_bits; }
static constexpr int header_bytes(const IntLayout& l) { return l.two_level ? (l.has_minimum ? 4 : 2) * kPanel : 0; }
static constexpr int scale_bytes(const IntLayout& l) {
    return (l.has_minimum ? 2 : 1) * kPanel * (l.two_level ? l.parts : 2);
}
static constexpr int group_bytes(const IntLayout& l) {
    return scale_bytes(l) + low_bytes(l) + kGroup * kPanel / 8 * l.high_bits;
}
// Where the header of a group is, and the group itself, in bytes from the start of the panel.
static constexpr size_t header_offset(const IntLayout& l, size_t group) {
    return group / kHeaderGroups * static_cast<size_t>(header_bytes(l) + kHeaderGroups * group_bytes(l));
}
static constexpr size_t group_offset(const IntLayout& l, size_t group) {
    if (!l.two_level) return group * static_cast<size_t>(group_bytes(l));
    return header_offset(l, group) + static_cast<size_t>(header_bytes(l)) +
           group % kHeaderGroups * static_cast<size_t>(group_bytes(l));
}

// Of IQ4_NL and IQ4_XS (ggml-common.h, kvalues_iq4nl).
constexpr int8_t kCodeLevels[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

// Nibbles that share a scale per group: their 16 possible values can be looked up.
static constexpr bool is_int4(WeightKind kind) {
    const IntLayout l = int_layout(kind);
    return l.low_bits == 4 && l.high_bits == 0 && l.parts == 1;
}
// Products with it read Quantised::low.
static constexpr bool has_halves(WeightKind kind) { return int_layout(kind).parts == 2; }

}  // namespace octavo
