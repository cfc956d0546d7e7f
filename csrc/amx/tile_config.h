// What ldtilecfg reads, for the instructions and for their software model.
#pragma once

#include <stdint.h>

namespace {
namespace tiles {

// Palette 1: rows and bytes per row of each of the 8 tiles (Intel SDM vol. 1, 18.3). Both 0: a tile that is not used.
struct alignas(64) Config {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t bytes_per_row[16] = {};
    uint8_t rows[16] = {};
};
static_assert(sizeof(Config) == 64);

}  // namespace tiles
}  // namespace
