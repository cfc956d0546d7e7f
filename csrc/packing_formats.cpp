#include "packing_formats.h"

#include <cstring>

#include "ops/int_layout.h"

namespace octavo {

namespace {

uint16_t half_at(const uint8_t* p) {
    uint16_t half;
    std::memcpy(&half, p, 2);
    return half;
}
uint16_t negated(uint16_t half) { return half ^ 0x8000u; }

// 16 bytes: weight j low, j + 16 high.
void nibbles(const uint8_t* p, GroupValues& out) {
    for (int j = 0; j < 16; ++j) {
        out.q[j] = p[j] & 15;
        out.q[16 + j] = p[j] >> 4;
    }
}
// The fifth bit of weight j: bit j of 4 bytes.
void fifth_bits(const uint8_t* p, GroupValues& out) {
    for (int j = 0; j < kGroup; ++j) out.q[j] |= static_cast<uint8_t>((p[j / 8] >> j % 8 & 1) << 4);
}
// Two bits each, of 32 bytes for four groups.
void crumbs(const uint8_t* p, int group, GroupValues& out) {
    p += group / 4 * kGroup;
    for (int j = 0; j < kGroup; ++j) out.q[j] = p[j] >> 2 * (group % 4) & 3;
}
// Four bits each, of 32 bytes for two groups.
void wide_nibbles(const uint8_t* p, int group, GroupValues& out) {
    p += group / 2 * kGroup;
    for (int j = 0; j < kGroup; ++j) out.q[j] = p[j] >> 4 * (group % 2) & 15;
}
// Sub-scales and sub-minima of Q4_K and Q5_K, 6 bits each.
void six_bit_pair(const uint8_t* p, int group, GroupValues& out) {
    if (group < 4) {
        out.sub[0] = p[group] & 63;
        out.sub_minimum[0] = p[group + 4] & 63;
        return;
    }
    out.sub[0] = static_cast<uint8_t>((p[group + 4] & 15) | p[group - 4] >> 6 << 4);
    out.sub_minimum[0] = static_cast<uint8_t>(p[group + 4] >> 4 | p[group] >> 6 << 4);
}

// Bits of every step into a plane of 8, 4, 2 or 1 bits per weight.
void put_plane(const GroupValues& values, int shift, int bits, int lane, uint8_t* plane) {
    for (int step = 0; step < 8; ++step) {
        const int per_byte = 8 / bits;
        const int byte = bits == 4 ? step % 4 : step / per_byte, position = bits == 4 ? step / 4 : step % per_byte;
        for (int j = 0; j < 4; ++j) {
            const int part = values.q[4 * step + j] >> shift & ((1 << bits) - 1);
            plane[byte * 4 * kPanel + lane * 4 + j] |= static_cast<uint8_t>(part << bits * position);
        }
    }
}

}  // namespace

void take_q5_0(const uint8_t* block, int, GroupValues& out) {
    out.d = half_at(block);
    nibbles(block + 6, out);
    fifth_bits(block + 2, out);
}

void take_q5_1(const uint8_t* block, int, GroupValues& out) {
    out.d = half_at(block);
    out.minimum = half_at(block + 2);
    nibbles(block + 8, out);
    fifth_bits(block + 4, out);
}

void take_q2_k(const uint8_t* block, int group, GroupValues& out) {
    out.d = half_at(block + 80);
    out.minimum = negated(half_at(block + 82));
    for (int part = 0; part < 2; ++part) {
        out.sub[part] = block[2 * group + part] & 15;
        out.sub_minimum[part] = block[2 * group + part] >> 4;
    }
    crumbs(block + 16, group, out);
}

void take_q3_k(const uint8_t* block, int group, GroupValues& out) {
    out.d = half_at(block + 108);
    const uint8_t* scales = block + 96;
    for (int part = 0; part < 2; ++part) {
        const int i = 2 * group + part;
        const int low = scales[i % 8] >> (i < 8 ? 0 : 4) & 15, high = scales[8 + i % 4] >> 2 * (i / 4) & 3;
        out.sub[part] = static_cast<uint8_t>((low | high << 4) - 32);
    }
    crumbs(block + 32, group, out);
    for (int j = 0; j < kGroup; ++j) out.q[j] |= static_cast<uint8_t>((block[j] >> group & 1) << 2);
}

void take_q4_k(const uint8_t* block, int group, GroupValues& out) {
    out.d = half_at(block);
    out.minimum = negated(half_at(block + 2));
    six_bit_pair(block + 4, group, out);
    wide_nibbles(block + 16, group, out);
}

void take_q5_k(const uint8_t* block, int group, GroupValues& out) {
    out.d = half_at(block);
    out.minimum = negated(half_at(block + 2));
    six_bit_pair(block + 4, group, out);
    wide_nibbles(block + 48, group, out);
    for (int j = 0; j < kGroup; ++j) out.q[j] |= static_cast<uint8_t>((block[16 + j] >> group & 1) << 4);
}

void take_q6_k(const uint8_t* block, int group, GroupValues& out) {
    out.d = half_at(block + 208);
    std::memcpy(out.sub, block + 192 + 2 * group, 2);
    const uint8_t* low = block + group / 4 * 64 + group % 2 * kGroup;  // groups 0, 1 low and 2, 3 high of 64 bytes
    const uint8_t* high = block + 128 + group / 4 * kGroup;
    for (int j = 0; j < kGroup; ++j)
        out.q[j] =
            static_cast<uint8_t>((low[j] >> (group % 4 < 2 ? 0 : 4) & 15) | (high[j] >> 2 * (group % 4) & 3) << 4);
}

void take_i8_k(const uint8_t* block, int group, GroupValues& out) {
    out.d = half_at(block);
    std::memcpy(out.sub, block + 2 + 2 * group, 2);
    std::memcpy(out.q, block + 18 + group * kGroup, kGroup);
}

void take_iq4_nl(const uint8_t* block, int, GroupValues& out) {
    out.d = half_at(block);
    nibbles(block + 2, out);
}

void take_iq4_xs(const uint8_t* block, int group, GroupValues& out) {
    out.d = half_at(block);
    const int low = block[4 + group / 2] >> 4 * (group % 2) & 15, high = half_at(block + 2) >> 2 * group & 3;
    out.sub[0] = static_cast<uint8_t>((low | high << 4) - 32);
    nibbles(block + 8 + 16 * group, out);
}

void put_group(WeightKind kind, const GroupValues& values, bool first, int lane, uint8_t* header, uint8_t* group) {
    const IntLayout layout = int_layout(kind);
    uint8_t* halves = layout.two_level ? header : group;
    if (first || !layout.two_level) {
        std::memcpy(halves + 2 * lane, &values.d, 2);
        if (layout.has_minimum) std::memcpy(halves + 2 * (kPanel + lane), &values.minimum, 2);
    }
    for (int part = 0; layout.two_level && part < layout.parts; ++part) {
        group[part * kPanel + lane] = values.sub[part];
        if (layout.has_minimum) group[(layout.parts + part) * kPanel + lane] = values.sub_minimum[part];
    }
    uint8_t* low = group + scale_bytes(layout);
    put_plane(values, 0, layout.low_bits, lane, low);
    if (layout.high_bits) put_plane(values, layout.low_bits, layout.high_bits, lane, low + low_bytes(layout));
}

}  // namespace octavo
