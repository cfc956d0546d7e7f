// The functions of amx/tiles.h as a software model, for hosts without AMX (Intel SDM vol. 2: TILELOADD, TDPBSUD, ...).
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace {
namespace tiles {

struct alignas(64) Config {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t bytes_per_row[16] = {};
    uint8_t rows[16] = {};
};

struct State {
    Config config;
    uint8_t tile[8][16][64];
};
inline State& state() {
    static thread_local State s;
    return s;
}

inline void load_config(const Config& config) { state().config = config; }
inline void release() { state() = State{}; }

template <int Tile>
inline void load(const void* base, size_t stride) {
    State& s = state();
    __builtin_memset(s.tile[Tile], 0, sizeof(s.tile[Tile]));
    for (int row = 0; row < s.config.rows[Tile]; ++row)
        __builtin_memcpy(s.tile[Tile][row], static_cast<const uint8_t*>(base) + static_cast<size_t>(row) * stride,
                         s.config.bytes_per_row[Tile]);
}
template <int Tile>
inline void store(void* base, size_t stride) {
    State& s = state();
    for (int row = 0; row < s.config.rows[Tile]; ++row)
        __builtin_memcpy(static_cast<uint8_t*>(base) + static_cast<size_t>(row) * stride, s.tile[Tile][row],
                         s.config.bytes_per_row[Tile]);
}

template <class Byte>
inline void multiply() {
    State& s = state();
    for (int m = 0; m < s.config.rows[2]; ++m) {
        int32_t sums[16] = {};
        for (int k = 0; k < s.config.bytes_per_row[0] / 4; ++k)
            for (int n = 0; n < s.config.bytes_per_row[2] / 4; ++n)
                for (int i = 0; i < 4; ++i)
                    sums[n] +=
                        static_cast<int8_t>(s.tile[0][m][4 * k + i]) * static_cast<Byte>(s.tile[1][k][4 * n + i]);
        __builtin_memcpy(s.tile[2][m], sums, sizeof(sums));
    }
}
inline void multiply_unsigned() { multiply<uint8_t>(); }
inline void multiply_signed() { multiply<int8_t>(); }

}  // namespace tiles
}  // namespace
