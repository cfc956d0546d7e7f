// AMX tile instructions as functions. In our own assembly because GCC 12's intrinsics declare too little of what they
// read: its ldtilecfg names 8 of the 64 bytes, so that -O3 may drop the rest of the configuration.
#pragma once

#include <stddef.h>

#include "tile_config.h"

namespace {
namespace tiles {

// Sets all tiles to zero.
inline void load_config(const Config& config) { __asm__ volatile("ldtilecfg %0" ::"m"(config) : "memory"); }
// Leaves the unit idle: a thread with live tiles costs the kernel 8 KB per context switch.
inline void release() { __asm__ volatile("tilerelease" ::: "memory"); }

template <int Tile>
inline void zero() {
    __asm__ volatile("tilezero %%tmm%c0" ::"i"(Tile));
}
// stride: bytes from row to row.
template <int Tile>
inline void load(const void* base, size_t stride) {
    __asm__ volatile("tileloadd (%1,%2,1), %%tmm%c0" ::"i"(Tile), "r"(base), "r"(stride) : "memory");
}
// The same of data that L1 need not keep.
template <int Tile>
inline void load_passing(const void* base, size_t stride) {
    __asm__ volatile("tileloaddt1 (%1,%2,1), %%tmm%c0" ::"i"(Tile), "r"(base), "r"(stride) : "memory");
}
template <int Tile>
inline void store(void* base, size_t stride) {
    __asm__ volatile("tilestored %%tmm%c0, (%1,%2,1)" ::"i"(Tile), "r"(base), "r"(stride) : "memory");
}
// Sums [m][n] float32 += A [m][32 k] bfloat16 times B [16 pairs of k][n][2] bfloat16. Per output: the even k and the
// odd k as two chains of fused multiply-adds from 0, then sum + (even + odd); denormals are zero, rounding is to
// nearest.
template <int Sums, int A, int B>
inline void multiply_bf16() {
    __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(Sums), "i"(A), "i"(B));
}

}  // namespace tiles
}  // namespace
