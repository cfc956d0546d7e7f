// The file's quantised blocks taken apart, group of 32 by group, for packing (weights/blocks.py draws the blocks).
#pragma once

#include <cstdint>

#include "ops/types.h"

namespace octavo {

// 32 weights of one column, integers as the packed kind stores them (ops/int_layout.h).
struct GroupValues {
    uint8_t q[kGroup];
    uint16_t d, minimum;  // f16; of a kind with two levels those of its 256, the minimum negated
    uint8_t sub[2], sub_minimum[2];
};

// group: which one of the block
using TakeApart = void (*)(const uint8_t* block, int group, GroupValues& out);

void take_q5_0(const uint8_t* block, int group, GroupValues& out);
void take_q5_1(const uint8_t* block, int group, GroupValues& out);
void take_q2_k(const uint8_t* block, int group, GroupValues& out);
void take_q3_k(const uint8_t* block, int group, GroupValues& out);
void take_q4_k(const uint8_t* block, int group, GroupValues& out);
void take_q5_k(const uint8_t* block, int group, GroupValues& out);
void take_q6_k(const uint8_t* block, int group, GroupValues& out);
void take_i8_k(const uint8_t* block, int group, GroupValues& out);  // of weights/repack.py
void take_iq4_nl(const uint8_t* block, int group, GroupValues& out);
void take_iq4_xs(const uint8_t* block, int group, GroupValues& out);

// Into lane `lane` of a packed group of this kind and, if it is the first of eight, of its header.
void put_group(WeightKind kind, const GroupValues& values, bool first, int lane, uint8_t* header, uint8_t* group);

}  // namespace octavo
