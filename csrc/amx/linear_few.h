// Products of up to 64 rows with 4-bit weights by AMX tiles: weights are the A operand (16 columns of W x 32 k), which
// they are brought to with less work, and activations the B operand. The sums are the same, bit for bit, transposed.
#pragma once

#include "unpack.h"

namespace {

using octavo::kMaxColumns;
using octavo::LinearTask;

constexpr int kWeightPrefetch = 4096;  // bytes ahead in each panel: the hardware's prefetcher stops at every page

// Neighbouring panels, walked side by side along K.
template <WeightKind Kind, int Panels>
struct PackedPanels {
    static constexpr int kBytes = kBf16GroupBytes<Kind>, kAhead = kWeightPrefetch / kBytes;

    const uint8_t* data;
    size_t stride;
    int k_tiles;

    PackedPanels(const LinearTask& t, int panel)
        : data(t.w->data + static_cast<size_t>(panel) * t.w->panel_stride),
          stride(t.w->panel_stride),
          k_tiles(static_cast<int>(t.q.k_tiles)) {}
    PackedGroup at(int k, int p) const {
        if constexpr (Kind == WeightKind::kBf16) {
            const uint8_t* tile = data + p * stride + static_cast<size_t>(k) * kBytes;
            return {tile, tile};
        } else {
            return group_at<Kind>(data + p * stride, k);
        }
    }
    // What will be read some tiles later: beyond its end, a panel is followed by the next but one.
    const uint8_t* ahead(int k, int p) const {
        return at(k + kAhead, p).group + (k + kAhead < k_tiles ? 0 : (Panels - 1) * stride);
    }
};

// Tiles 0-3: sums [panel][tile of rows]; 4: weights; 5: those of a second panel, or activations; 6, 7: activations, 16
// of them at a time or one alone.
constexpr tiles::Config config_for_columns(int columns) {
    tiles::Config config;
    for (int tile = 0; tile < 8; ++tile) {
        const bool weights = tile == 4 || tile == 5;
        config.rows[tile] = kTileRows;
        config.bytes_per_row[tile] = static_cast<uint16_t>(weights ? kTileStride : 4 * columns);
    }
    return config;
}
// Static: ldtilecfg has been seen to fault on a configuration that an optimiser had taken off the stack.
constexpr tiles::Config kOneColumn = config_for_columns(1), kAllColumns = config_for_columns(kTileRows);

// The activations of some tiles of rows as B operands.
struct Columns {
    explicit Columns(const LinearTask& t)
        : data(t.columns ? t.columns : t.q.tiles + tile_offset(t.q, static_cast<size_t>(t.row_begin), 0)),
          row_tile(t.q.k_tiles * kTileWords),
          stride(t.columns ? kTileStride : 4) {}  // one row is its own column

    const uint16_t* data;
    size_t row_tile, stride;  // words from tile to tile of rows; bytes from pair to pair of k
};

// Rows of the result from tile `Tile` of sums.
template <int Tile>
inline void store_columns(const LinearTask& t, int first_row, int panel) {
    const int left = t.row_end - t.row_begin - first_row, rows = left < kTileRows ? left : kTileRows;
    float* out = t.out + static_cast<size_t>(first_row) * t.out_stride + (panel - t.panel_begin) * kLanes;
    if (!t.columns) return tiles::store<Tile>(out, sizeof(float));
    alignas(64) float sums[kLanes][kTileRows];
    tiles::store<Tile>(sums, kTileStride);
    __m512i x[kLanes];
    for (int i = 0; i < kLanes; ++i) x[i] = load_register(sums[i]);
    transpose(x);
    for (int row = 0; row < rows; ++row) _mm512_storeu_si512(out + static_cast<size_t>(row) * t.out_stride, x[row]);
}

// f.operator()<0>(), ..., f.operator()<N - 1>(): tiles have no other indices than constants.
template <int N, class F>
inline void unrolled(const F& f) {
    if constexpr (N > 1) unrolled<N - 1>(f);
    f.template operator()<N - 1>();
}

template <WeightKind Kind, int Panels, int RowTiles>
void multiply_columns(const LinearTask& t, int panel) {
    static_assert(Panels * RowTiles <= 4);
    alignas(64) uint16_t room[2][Panels][kTileWords];  // weights of the tile of K at hand and of the next one
    const PackedPanels<Kind, Panels> w(t, panel);
    const Columns x(t);
    const auto unpack = [&](int k) {
        for (int p = 0; p < Panels; ++p) unpack_columns<Kind>(w.at(k, p), w.ahead(k, p), room[k % 2][p]);
    };
    unrolled<Panels * RowTiles>([]<int Sums>() { tiles::zero<Sums>(); });
    unpack(0);
    for (int k = 0; k < w.k_tiles; ++k) {
        if (k + 1 < w.k_tiles) unpack(k + 1);
        unrolled<RowTiles>([&]<int R>() {
            constexpr int kColumns = R % 3 == 2 ? 5 : 6 + R % 3;
            tiles::load<kColumns>(x.data + R * x.row_tile + k * kTileWords, x.stride);
            unrolled<Panels>([&]<int P>() {
                if constexpr (R == 0) tiles::load<4 + P>(room[k % 2][P], kTileStride);
                tiles::multiply_bf16<P * RowTiles + R, 4 + P, kColumns>();
            });
        });
    }
    unrolled<RowTiles>([&]<int R>() {
        unrolled<Panels>([&]<int P>() { store_columns<P * RowTiles + R>(t, R * kTileRows, panel + P); });
    });
}

template <WeightKind Kind, int Panels, int RowTiles>
void multiply_row_tiles(const LinearTask& t) {
    int panel = t.panel_begin;
    for (; panel + Panels <= t.panel_end; panel += Panels) multiply_columns<Kind, Panels, RowTiles>(t, panel);
    if (panel < t.panel_end) multiply_columns<Kind, 1, RowTiles>(t, panel);
}

// One row, or up to 64 that come as t.columns.
template <WeightKind Kind>
void multiply_few(const LinearTask& t) {
    constexpr void (*kByRowTiles[])(const LinearTask&) = {
        multiply_row_tiles<Kind, 2, 1>, multiply_row_tiles<Kind, 2, 2>, multiply_row_tiles<Kind, 1, 3>,
        multiply_row_tiles<Kind, 1, 4>};
    tiles::load_config(t.columns ? kAllColumns : kOneColumn);
    kByRowTiles[(t.row_end - t.row_begin - 1) / kTileRows](t);
    tiles::release();
}

// Activations of the first `rows` rows as B operands: LinearTask::columns.
void to_columns(const octavo::Quantised& x, int rows, uint16_t* columns) {
    for (int row = 0; row < rows; row += kTileRows) {
        const int n = rows - row < kTileRows ? rows - row : kTileRows;
        for (size_t k = 0; k < x.k_tiles; ++k, columns += kTileWords) {
            const uint16_t* tile = x.tiles + tile_offset(x, static_cast<size_t>(row), k);
            __m512i words[kTileRows];
            for (int i = 0; i < kTileRows; ++i)
                words[i] = i < n ? load_register(tile + i * kGroup) : _mm512_setzero_si512();
            transpose(words);
            for (int i = 0; i < kTileRows; ++i) _mm512_storeu_si512(columns + i * kTileRows * 2, words[i]);
        }
    }
}

}  // namespace
