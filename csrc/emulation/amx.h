// The functions of amx/tiles.h as a software model, for hosts without AMX (Intel SDM vol. 2: TILELOADD, TDPBF16PS,
// ...).
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "../amx/tile_config.h"

namespace {
namespace tiles {

struct State {
    Config config;
    uint8_t tile[8][16][64];
};
inline State& state() {
    static thread_local State s;
    return s;
}

inline void load_config(const Config& config) { state() = State{config, {}}; }
inline void release() { state() = State{}; }

template <int Tile>
inline void zero() {
    __builtin_memset(state().tile[Tile], 0, sizeof(state().tile[Tile]));
}
template <int Tile>
inline void load(const void* base, size_t stride) {
    State& s = state();
    zero<Tile>();
    for (int row = 0; row < s.config.rows[Tile]; ++row)
        __builtin_memcpy(s.tile[Tile][row], static_cast<const uint8_t*>(base) + static_cast<size_t>(row) * stride,
                         s.config.bytes_per_row[Tile]);
}
template <int Tile>
inline void load_passing(const void* base, size_t stride) {
    load<Tile>(base, stride);
}
template <int Tile>
inline void store(void* base, size_t stride) {
    State& s = state();
    for (int row = 0; row < s.config.rows[Tile]; ++row)
        __builtin_memcpy(static_cast<uint8_t*>(base) + static_cast<size_t>(row) * stride, s.tile[Tile][row],
                         s.config.bytes_per_row[Tile]);
}

inline float bf16_at(const uint8_t* row, int index) {
    uint16_t word;
    __builtin_memcpy(&word, row + 2 * index, 2);
    return __builtin_bit_cast(float, static_cast<uint32_t>(word) << 16);
}

// The order of additions was measured on hardware (docs/kernels.md). Denormals: as the thread's MXCSR says, which the
// compute threads set as the instruction behaves.
template <int Sums, int A, int B>
inline void multiply_bf16() {
    State& s = state();
    const Config& c = s.config;
    const bool fit = c.rows[Sums] && c.rows[Sums] == c.rows[A] && c.rows[B] && c.bytes_per_row[A] == 4 * c.rows[B] &&
                     c.bytes_per_row[Sums] && c.bytes_per_row[Sums] == c.bytes_per_row[B];
    if (!fit) __builtin_trap();  // the instruction would fault
    for (int m = 0; m < s.config.rows[Sums]; ++m) {
        float sums[16];
        __builtin_memcpy(sums, s.tile[Sums][m], sizeof(sums));
        for (int n = 0; n < s.config.bytes_per_row[Sums] / 4; ++n) {
            float even = 0.0f, odd = 0.0f;
            for (int k = 0; k < s.config.bytes_per_row[A] / 4; ++k) {
                even = __builtin_fmaf(bf16_at(s.tile[A][m], 2 * k), bf16_at(s.tile[B][k], 2 * n), even);
                odd = __builtin_fmaf(bf16_at(s.tile[A][m], 2 * k + 1), bf16_at(s.tile[B][k], 2 * n + 1), odd);
            }
            sums[n] += even + odd;
        }
        __builtin_memcpy(s.tile[Sums][m], sums, sizeof(sums));
    }
}

}  // namespace tiles
}  // namespace
