// Products in bfloat16 by AMX tiles. Numerics: ops/linear_bf16.h.
//
// Activations are the A operand (16 rows x 32 k), weights the B operand (16 pairs of k x 16 columns), so that sums come
// out as rows of the result. Up to two tiles of rows times two panels share their loads: four sums, two A, two B.
// Integer weights are brought to bfloat16 while the first rows are multiplied, one tile ahead, so that the vector units
// work beside the tile unit; further rows find them in L1.
#pragma once

#include "../ops/linear_bf16.h"

namespace {

using octavo::kGroup;
using octavo::kTileRows;
using octavo::LinearTask;
using octavo::WeightKind;

constexpr int kTileWords = kTileRows * kGroup;  // 1 KB: of activations [16][32], of weights [16 pairs][16 columns][2]
constexpr int kTileStride = 64;                 // bytes
constexpr int kChunkTiles = 18;                 // tiles of K at a time: two panels of them are 36 KB and fit in L1
constexpr int kWeightPrefetch = 4096;           // bytes ahead: the hardware's prefetcher stops at every page

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

inline __m512i load_register(const void* p) { return _mm512_loadu_si512(p); }
inline void prefetch(const uint8_t* p) {
    _mm_prefetch(reinterpret_cast<const char*>(p + kWeightPrefetch), _MM_HINT_T0);
}
inline void store_rounded(uint16_t* row, Vec first, Vec second) {
    _mm512_storeu_si512(row, (__m512i)_mm512_cvtne2ps_pbh(second, first));
}

// One group of 32 k and 16 columns as a tile of weights.
template <WeightKind Kind>
inline void unpack_tile(const uint8_t* group, uint16_t* tile);

// 4-bit weights. A register of the group holds 8 k of a column per lane; lanes are doubled, so that one lane of a pair
// picks the even k and the other the odd k, and a rounded register is a row of the tile.
template <bool HasMinimum>
inline void unpack_nibbles(const uint8_t* group, uint16_t* tile) {
    const __m512i lower = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
    const __m512i upper = _mm512_setr_epi32(8, 8, 9, 9, 10, 10, 11, 11, 12, 12, 13, 13, 14, 14, 15, 15);
    const Vec integers = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const uint16_t* scales = reinterpret_cast<const uint16_t*>(group);
    const Vec d = load_f16(scales), m = HasMinimum ? load_f16(scales + kLanes) : mul(d, set1(-8.0f));
    const Vec d_lower = _mm512_permutexvar_ps(lower, d), d_upper = _mm512_permutexvar_ps(upper, d);
    const Vec m_lower = _mm512_permutexvar_ps(lower, m), m_upper = _mm512_permutexvar_ps(upper, m);
    // Where the two k of each row's pair begin in a lane: bytes hold k and k + 4 (ops/types.h).
    const __m512i shifts[4] = {
        _mm512_setr_epi32(0, 8, 0, 8, 0, 8, 0, 8, 0, 8, 0, 8, 0, 8, 0, 8),
        _mm512_setr_epi32(16, 24, 16, 24, 16, 24, 16, 24, 16, 24, 16, 24, 16, 24, 16, 24),
        _mm512_setr_epi32(4, 12, 4, 12, 4, 12, 4, 12, 4, 12, 4, 12, 4, 12, 4, 12),
        _mm512_setr_epi32(20, 28, 20, 28, 20, 28, 20, 28, 20, 28, 20, 28, 20, 28, 20, 28),
    };
    const uint8_t* nibbles = group + (HasMinimum ? 4 : 2) * kLanes;
    for (int i = 0; i < 4; ++i) {
        prefetch(nibbles + i * 64);
        const __m512i eight = load_register(nibbles + i * 64);
        const __m512i a = _mm512_permutexvar_epi32(lower, eight), b = _mm512_permutexvar_epi32(upper, eight);
        for (int r = 0; r < 4; ++r) {  // the permutation looks up integers[low four bits of the lane]
            const Vec qa = _mm512_permutexvar_ps(_mm512_srlv_epi32(a, shifts[r]), integers);
            const Vec qb = _mm512_permutexvar_ps(_mm512_srlv_epi32(b, shifts[r]), integers);
            store_rounded(tile + (4 * i + r) * 2 * kLanes, fma(qa, d_lower, m_lower), fma(qb, d_upper, m_upper));
        }
    }
}
template <>
inline void unpack_tile<WeightKind::kInt4>(const uint8_t* group, uint16_t* tile) {
    unpack_nibbles<true>(group, tile);
}
template <>
inline void unpack_tile<WeightKind::kInt4Z>(const uint8_t* group, uint16_t* tile) {
    unpack_nibbles<false>(group, tile);
}

// 8-bit weights: 16 bytes are 4 columns of 4 k, in order; rounded, the pairs of two rows alternate.
template <>
inline void unpack_tile<WeightKind::kInt8>(const uint8_t* group, uint16_t* tile) {
    const Vec d = load_f16(reinterpret_cast<const uint16_t*>(group));
    Vec scale[4];  // of columns 4 c, 4 c + 1, ..., four times each
    for (int c = 0; c < 4; ++c)
        scale[c] =
            _mm512_permutexvar_ps(_mm512_add_epi32(_mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3),
                                                   _mm512_set1_epi32(4 * c)),
                                  d);
    const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    const __m512i odd = _mm512_setr_epi32(1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
    const uint8_t* bytes = group + 2 * kLanes;
    for (int i = 0; i < 8; ++i, bytes += 64, tile += 4 * kLanes) {
        prefetch(bytes);
        Vec w[4];
        for (int c = 0; c < 4; ++c) {
            const __m128i four = _mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes + 16 * c));
            w[c] = mul(to_float(_mm512_cvtepi8_epi32(four)), scale[c]);
        }
        const __m512i first = (__m512i)_mm512_cvtne2ps_pbh(w[1], w[0]),
                      second = (__m512i)_mm512_cvtne2ps_pbh(w[3], w[2]);
        _mm512_storeu_si512(tile, _mm512_permutex2var_epi32(first, even, second));
        _mm512_storeu_si512(tile + 2 * kLanes, _mm512_permutex2var_epi32(first, odd, second));
    }
}

// Up to two panels over some tiles of K, and room for their weights as tiles.
template <WeightKind Kind, int Panels>
struct WeightTiles {
    static constexpr bool kUnpacked = Kind != WeightKind::kBf16;
    static constexpr int kBytes = kBf16GroupBytes<Kind>;

    const uint8_t* packed[Panels];
    uint16_t (*room)[Panels][kTileWords];  // [tile of K]

    void unpack(int k) {
        if constexpr (kUnpacked)
            for (int p = 0; p < Panels; ++p) unpack_tile<Kind>(packed[p] + k * kBytes, room[k][p]);
    }
    const void* at(int k, int p) const {
        if constexpr (kUnpacked) return room[k][p];
        return packed[p] + k * kBytes;
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
        tiles::load<4>(x, kTileStride);
        if constexpr (RowTiles == 2) tiles::load<5>(x + row_tile_words, kTileStride);
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
        WeightTiles<Kind, Panels> w;
        w.room = room;
        for (int p = 0; p < Panels; ++p)
            w.packed[p] = t.w->data + (panel + p) * t.w->panel_stride + static_cast<size_t>(k) * w.kBytes;
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
    int configured = 0;
    int panel = t.panel_begin;
    for (; panel + 2 <= t.panel_end; panel += 2) multiply_panels<Kind, 2>(t, panel, configured);
    if (panel < t.panel_end) multiply_panels<Kind, 1>(t, panel, configured);
    tiles::release();
}

}  // namespace
