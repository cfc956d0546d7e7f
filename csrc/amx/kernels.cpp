// The AVX-512 table with AMX (TILE, INT8) for products of 16 rows and more. The integer sums are exact in either, and
// the float half is the same, so the number of rows may choose between them without changing a bit. Compiled a second
// time against emulation/ for tests.
#include "../simd/avx512.h"
#if defined(OCTAVO_EMULATED)
#include "../emulation/amx.h"
#else
#include "tiles.h"
#endif

#include "../avx512/linear_int.h"

namespace {

constexpr int kTileRows = 16;
constexpr int kMaxTiles = octavo::kMaxLinearRows / kTileRows;

// Static: ldtilecfg has been seen to fault on a configuration that an optimiser had taken off the stack.
const tiles::Config kConfig = {
    .bytes_per_row = {kGroup, 4 * octavo::kPanel, 4 * octavo::kPanel},  // activations, weights, sums
    .rows = {kTileRows, kGroup / 4, kTileRows},
};

// Weights of one group and panel as a tile: [k / 4][column][4] bytes.
template <bool Nibbles>
inline void load_weights(const uint8_t* w) {
    if (!Nibbles) {
        tiles::load<1>(w, 64);
        return;
    }
    alignas(64) uint8_t bytes[kGroup / 4][64];
    const __m512i low = _mm512_set1_epi8(15);
    for (int i = 0; i < 4; ++i) {
        const __m512i pairs = load_bytes(w + i * 64);
        _mm512_storeu_si512(bytes[2 * i], _mm512_and_si512(pairs, low));
        _mm512_storeu_si512(bytes[2 * i + 1], _mm512_and_si512(_mm512_srli_epi16(pairs, 4), low));
    }
    tiles::load<1>(bytes, 64);
}

// One panel times `num_tiles` tiles of 16 rows. The group runs outermost, so that its weights are unpacked once.
template <WeightKind Kind>
void amx_panel(const LinearTask& t, int row_begin, int num_tiles, int panel) {
    using Format = IntFormat<Kind>;
    const int groups = t.w->cols / kGroup;
    const uint8_t* w = t.w->data + panel * t.w->panel_stride;
    Vec acc[kMaxTiles * kTileRows];
    for (int r = 0; r < num_tiles * kTileRows; ++r) acc[r] = zero();
    alignas(64) int32_t products[kTileRows][octavo::kPanel];
    for (int g = 0; g < groups; ++g, w += Format::kGroupBytes) {
        load_weights<Format::kNibbles>(w + Format::kScaleBytes);
        const uint16_t* scales = reinterpret_cast<const uint16_t*>(w);
        const Vec d = load_f16(scales);
        const Vec m = Format::kHasMinimum ? load_f16(scales + kLanes) : mul(d, set1(-8.0f));
        for (int tile = 0; tile < num_tiles; ++tile) {
            const int first = row_begin + tile * kTileRows;
            tiles::load<0>(t.q.q + first * t.q.cols + g * kGroup, t.q.cols);
            Format::kNibbles ? tiles::multiply_unsigned() : tiles::multiply_signed();
            tiles::store<2>(products, sizeof(products[0]));
            const float *scale = t.q.scale + first * groups + g, *sum = t.q.sum + first * groups + g;
            for (int r = 0; r < kTileRows; ++r) {
                Vec& a = acc[tile * kTileRows + r];
                a = fma(mul(to_float(load_bytes(products[r])), set1(scale[r * groups])), d, a);
                if (Format::kNibbles) a = fma(set1(sum[r * groups]), m, a);
            }
        }
    }
    for (int r = 0; r < num_tiles * kTileRows; ++r)
        store(t.out + (row_begin + r - t.row_begin) * t.out_stride + (panel - t.panel_begin) * kLanes, acc[r]);
}

template <WeightKind Kind>
void linear_amx(const LinearTask& t) {
    const int num_tiles = (t.row_end - t.row_begin) / kTileRows;
    if (num_tiles > 0) {
        tiles::load_config(kConfig);
        for (int panel = t.panel_begin; panel < t.panel_end; ++panel)
            for (int tile = 0; tile < num_tiles; tile += kMaxTiles)
                amx_panel<Kind>(t, t.row_begin + tile * kTileRows,
                                num_tiles - tile < kMaxTiles ? num_tiles - tile : kMaxTiles, panel);
        tiles::release();
    }
    const int rest = t.row_begin + num_tiles * kTileRows;
    if (rest == t.row_end) return;
    LinearTask few = t;
    few.out += (rest - t.row_begin) * t.out_stride;
    few.row_begin = rest;
    linear_int<Kind>(few);
}

}  // namespace

namespace octavo {

#if defined(OCTAVO_EMULATED)
const Kernels& amx_emulated_kernels() {
    static Kernels table = avx512_emulated_kernels();
    table.name = "amx-emulated";
#else
const Kernels& amx_kernels() {
    static Kernels table = avx512_kernels();
    table.name = "amx";
#endif
    table.linear[static_cast<int>(WeightKind::kInt8)] = linear_amx<WeightKind::kInt8>;
    table.linear[static_cast<int>(WeightKind::kInt4)] = linear_amx<WeightKind::kInt4>;
    table.linear[static_cast<int>(WeightKind::kInt4Z)] = linear_amx<WeightKind::kInt4Z>;
    return table;
}

}  // namespace octavo
