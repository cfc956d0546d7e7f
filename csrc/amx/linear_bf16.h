// Products in bfloat16 by AMX tiles. Numerics: ops/linear_bf16.h.
//
// Activations are the A operand (16 rows x 32 k), weights the B operand (16 pairs of k x 16 columns), so that sums come
// out as rows of the result. Up to two tiles of rows times two panels share their loads: four sums, two A, two B.
// Integer weights are brought to bfloat16 while the first rows are multiplied, one tile ahead, so that the vector units
// work beside the tile unit; further rows find them in L1. linear_few.h has another way for up to 64 rows.
#pragma once

#include "linear_few.h"

namespace {

constexpr int kChunkTiles = 18;  // tiles of K at a time: two panels of them are 36 KB and fit in L1

// Tiles 0-3: sums [tile of rows][panel]; 4, 5: activations; 6, 7: weights. `rows` of 1 to 32 activations.
constexpr tiles::Config config_for_rows(int rows) {
    tiles::Config config;
    const int first = rows < kTileRows ? rows : kTileRows;
    const int of_tile[8] = {first, first, rows - first, rows - first, first, rows - first, kTileRows, kTileRows};
    for (int tile = 0; tile < 8; ++tile) {
        config.rows[tile] = static_cast<uint8_t>(of_tile[tile]);
        config.bytes_per_row[tile] = of_tile[tile] ? kTileStride : 0;
    }
    return config;
}
struct Configs {
    tiles::Config of[2 * kTileRows + 1];
};
constexpr Configs all_configs() {
    Configs configs;
    for (int rows = 1; rows <= 2 * kTileRows; ++rows) configs.of[rows] = config_for_rows(rows);
    return configs;
}
// Static: ldtilecfg has been seen to fault on a configuration that an optimiser had taken off the stack.
constexpr Configs kConfigs = all_configs();

// Up to two panels over some tiles of K, and room for their weights as tiles.
template <WeightKind Kind, int Panels>
struct WeightTiles {
    static constexpr bool kUnpacked = Kind != WeightKind::kBf16;

    PackedPanels<Kind, Panels> packed;
    int first;                             // tile of K
    uint16_t (*room)[Panels][kTileWords];  // [tile of K]

    void unpack(int k) {
        for (int p = 0; p < Panels; ++p) {
            const uint8_t* ahead = packed.ahead(first + k, p);
            if constexpr (kUnpacked)
                unpack_tile<Kind>(packed.at(first + k, p), ahead, room[k][p]);
            else
                prefetch_lines(ahead, 0, kTileRows, kTileWords * 2);
        }
    }
    const void* at(int k, int p) const {
        if constexpr (kUnpacked) return room[k][p];
        return packed.at(first + k, p).group;
    }
};

// Adds num_k tiles of K to the sums of `RowTiles` tiles of rows. x: the first of them; out: their place in the result.
template <WeightKind Kind, int Panels, int RowTiles, bool Unpack>
inline void multiply(WeightTiles<Kind, Panels>& w, int num_k, const uint16_t* x, size_t row_tile_words, bool first,
                     float* out, size_t out_stride) {
    const size_t stride = out_stride * sizeof(float);
    float* below = out + kTileRows * out_stride;
    if (first) {
        tiles::zero<0>();
        if constexpr (Panels == 2) tiles::zero<1>();
        if constexpr (RowTiles == 2) tiles::zero<2>();
        if constexpr (RowTiles == 2 && Panels == 2) tiles::zero<3>();
    } else {
        tiles::load<0>(out, stride);
        if constexpr (Panels == 2) tiles::load<1>(out + kLanes, stride);
        if constexpr (RowTiles == 2) tiles::load<2>(below, stride);
        if constexpr (RowTiles == 2 && Panels == 2) tiles::load<3>(below + kLanes, stride);
    }
    if (Unpack) w.unpack(0);
    for (int k = 0; k < num_k; ++k, x += kTileWords) {
        if (Unpack && k + 1 < num_k) w.unpack(k + 1);
        // Rows come from L2 again and again; L1 is for the weights.
        tiles::load_passing<4>(x, kTileStride);
        if constexpr (RowTiles == 2) tiles::load_passing<5>(x + row_tile_words, kTileStride);
        tiles::load<6>(w.at(k, 0), kTileStride);
        tiles::multiply_bf16<0, 4, 6>();
        if constexpr (RowTiles == 2) tiles::multiply_bf16<2, 5, 6>();
        if constexpr (Panels == 2) {
            tiles::load<7>(w.at(k, 1), kTileStride);
            tiles::multiply_bf16<1, 4, 7>();
            if constexpr (RowTiles == 2) tiles::multiply_bf16<3, 5, 7>();
        }
    }
    tiles::store<0>(out, stride);
    if constexpr (Panels == 2) tiles::store<1>(out + kLanes, stride);
    if constexpr (RowTiles == 2) tiles::store<2>(below, stride);
    if constexpr (RowTiles == 2 && Panels == 2) tiles::store<3>(below + kLanes, stride);
}

template <WeightKind Kind, int Panels, bool Unpack>
inline void multiply_rows(WeightTiles<Kind, Panels>& w, const LinearTask& t, int panel, int row, int rows, int k,
                          int num_k) {
    const uint16_t* x = t.q.tiles + tile_offset(t.q, static_cast<size_t>(row), static_cast<size_t>(k));
    float* out = t.out + static_cast<size_t>(row - t.row_begin) * t.out_stride + (panel - t.panel_begin) * kLanes;
    const size_t row_tile_words = t.q.k_tiles * kTileWords;
    if (rows > kTileRows)
        multiply<Kind, Panels, 2, Unpack>(w, num_k, x, row_tile_words, k == 0, out, t.out_stride);
    else
        multiply<Kind, Panels, 1, Unpack>(w, num_k, x, row_tile_words, k == 0, out, t.out_stride);
}

template <WeightKind Kind, int Panels>
void multiply_panels(const LinearTask& t, int panel, int& configured) {
    alignas(64) uint16_t room[kChunkTiles][Panels][kTileWords];
    const int k_tiles = static_cast<int>(t.q.k_tiles);
    for (int k = 0; k < k_tiles; k += kChunkTiles) {
        const int num_k = k_tiles - k < kChunkTiles ? k_tiles - k : kChunkTiles;
        WeightTiles<Kind, Panels> w{{t, panel}, k, room};
        for (int row = t.row_begin; row < t.row_end; row += 2 * kTileRows) {
            const int rows = t.row_end - row < 2 * kTileRows ? t.row_end - row : 2 * kTileRows;
            if (configured != rows) tiles::load_config(kConfigs.of[configured = rows]);
            if (row == t.row_begin)
                multiply_rows<Kind, Panels, true>(w, t, panel, row, rows, k, num_k);
            else
                multiply_rows<Kind, Panels, false>(w, t, panel, row, rows, k, num_k);
        }
    }
}

template <WeightKind Kind>
void linear_bf16_tiles(const LinearTask& t) {
    if constexpr (octavo::is_int4(Kind))
        if (t.columns || t.row_end - t.row_begin == 1) return multiply_few<Kind>(t);
    int configured = 0;
    int panel = t.panel_begin;
    for (; panel + 2 <= t.panel_end; panel += 2) multiply_panels<Kind, 2>(t, panel, configured);
    if (panel < t.panel_end) multiply_panels<Kind, 1>(t, panel, configured);
    tiles::release();
}

}  // namespace
