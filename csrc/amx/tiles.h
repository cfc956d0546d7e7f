// AMX tile instructions as functions. In our own assembly because GCC 12's intrinsics declare too little of what they
// read: its ldtilecfg names 8 of the 64 bytes, so that -O3 may drop the rest of the configuration.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace {
namespace tiles {

// Palette 1: rows and bytes per row of each of the 8 tiles (Intel SDM vol. 1, 18.3).
struct alignas(64) Config {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t bytes_per_row[16] = {};
    uint8_t rows[16] = {};
};
static_assert(sizeof(Config) == 64);

inline void load_config(const Config& config) { __asm__ volatile("ldtilecfg %0" ::"m"(config) : "memory"); }
// Leaves the unit idle: a thread with live tiles costs the kernel 8 KB per context switch.
inline void release() { __asm__ volatile("tilerelease" ::: "memory"); }

#define OCTAVO_TILE_SWITCH(Tile, operation) \
    if constexpr (Tile == 0)                \
        operation("0");                     \
    else if constexpr (Tile == 1)           \
        operation("1");                     \
    else if constexpr (Tile == 2)           \
        operation("2");                     \
    else if constexpr (Tile == 3)           \
        operation("3");                     \
    else                                    \
        static_assert(Tile < 4)

template <int Tile>
inline void load(const void* base, size_t stride) {
#define OCTAVO_TILE_LOAD(n) __asm__ volatile("tileloadd (%0,%1,1), %%tmm" n::"r"(base), "r"(stride) : "memory")
    OCTAVO_TILE_SWITCH(Tile, OCTAVO_TILE_LOAD);
#undef OCTAVO_TILE_LOAD
}
template <int Tile>
inline void store(void* base, size_t stride) {
#define OCTAVO_TILE_STORE(n) __asm__ volatile("tilestored %%tmm" n ", (%0,%1,1)" ::"r"(base), "r"(stride) : "memory")
    OCTAVO_TILE_SWITCH(Tile, OCTAVO_TILE_STORE);
#undef OCTAVO_TILE_STORE
}
#undef OCTAVO_TILE_SWITCH

// Tile 2 = tile 0 (signed bytes, [rows][k]) times tile 1 (bytes in fours, [k / 4][columns][4]), in int32.
inline void multiply_unsigned() { __asm__ volatile("tilezero %%tmm2\n\ttdpbsud %%tmm1, %%tmm0, %%tmm2" ::: "memory"); }
inline void multiply_signed() { __asm__ volatile("tilezero %%tmm2\n\ttdpbssd %%tmm1, %%tmm0, %%tmm2" ::: "memory"); }

}  // namespace tiles
}  // namespace
