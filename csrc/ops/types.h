// Plain records that the baseline code hands to the kernels. No methods, no STL: files compiled for one ISA include
// this.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace octavo {

constexpr int kPanel = 16;           // output columns (rows of the weight) that lie together: one column per lane
constexpr int kGroup = 32;           // weights along K that share a scale; also the K of one bfloat16 tile
constexpr int kTileRows = 16;        // rows of activations that lie together as bfloat16
constexpr int kMaxLinearRows = 256;  // rows that a LinearTask has at most
constexpr int kMaxColumns = 64;      // rows that Kernels::to_columns takes at most

// How a matrix is packed. Within a panel, k runs outermost, the 16 columns innermost.
enum class WeightKind : int {
    kF32,    // [k][16] float
    kF16,    // [k][16] binary16
    kBf16,   // [k / 2][16][2] bfloat16, k padded with zeros to a multiple of 32
    kInt8,   // per group: [16] f16 scale, [8][16][4] int8            w = d * q
    kInt4,   // per group: [16] f16 scale, [16] f16 minimum, nibbles  w = d * q + m
    kInt4Z,  // per group: [16] f16 scale, nibbles                    w = d * q - 8 d
    // the others are drawn in int_layout.h
    kInt5,    // Q5_1: f16 scale and minimum per 32
    kInt5Z,   // Q5_0: f16 scale per 32, w = d * (q - 16)
    kInt2K,   // Q2_K: sub-scale and sub-minimum per 16, f16 of both per 256
    kInt3K,   // Q3_K: sub-scale per 16, f16 per 256, w = d * (q - 4)
    kInt4K,   // Q4_K: sub-scale and sub-minimum per 32, f16 of both per 256
    kInt5K,   // Q5_K: likewise
    kInt6K,   // Q6_K: sub-scale per 16, f16 per 256, w = d * (q - 32)
    kInt8K,   // repacked IQ1 to IQ3, TQ: sub-scale per 16, f16 per 256, w = d / 8 * q
    kCode4,   // IQ4_NL: f16 scale per 32, nibbles are indices of 16 levels
    kCode4K,  // IQ4_XS: the same with a sub-scale per 32 and f16 per 256
    kCount
};
// nibbles of a group: [4][16][4] bytes; byte [i][column][j] holds k = 4 i + j low and k = 16 + 4 i + j high

struct Matrix {
    WeightKind kind;
    int rows;             // N: output features
    int cols;             // K: input features
    int panels;           // ceil(N / 16); columns beyond N are zero
    size_t panel_stride;  // bytes
    const uint8_t* data;
};

// Activations of a step, [rows][cols] float32. Row stride is a multiple of 16; lanes beyond cols are zero.
struct Floats {
    float* data;
    size_t stride;  // floats from row to row
};

// What the rows are rounded to before they meet weights that are not float32 or float16.
enum class Activations : int {
    kInt8,   // int8 in groups of 32 against integer weights; bfloat16 weights take float32 rows
    kBf16,   // bfloat16 against weights that are bfloat16, or dequantised and rounded to it
    kByRows  // integer weights: int8 for few rows, bfloat16 for many
};

// The same rows, rounded; either form may be missing.
struct Quantised {
    // per row and group of 32, x = scale * q with |q| <= 127
    int8_t* q;       // [rows][cols]
    float* scale;    // [rows][cols / 32]
    float* sum;      // [rows][cols / 32] scale * sum(q)
    int32_t* total;  // [rows][cols / 32] sum(q)
    int32_t* low;    // [rows][cols / 32] sum(q) of the first 16; null if no weight has a scale per 16
    size_t cols;
    // bfloat16, each 16 rows x 32 k one tile of 1 KB: [rows / 16][k_tiles][16][32]; zero beyond cols
    uint16_t* tiles;
    size_t k_tiles;
};
static inline size_t tile_offset(const Quantised& x, size_t row, size_t k_tile) {
    return ((row / kTileRows * x.k_tiles + k_tile) * kTileRows + row % kTileRows) * kGroup;
}

// One multiplication: panels [panel_begin, panel_end) of w times rows [row_begin, row_end) of x.
struct LinearTask {
    const Matrix* w;
    Floats x;                // for linear_float
    Quantised q;             // for linear_int8, linear_bf16
    int row_begin, row_end;  // row_begin a multiple of 16
    int panel_begin, panel_end;
    float* out;  // out[(row - row_begin) * out_stride + (panel - panel_begin) * 16 + lane], overwritten
    size_t out_stride;
    const uint16_t* columns = nullptr;  // for linear_bf16, if there are: all rows as Kernels::to_columns turns them
};

constexpr int kKvTile = 256;  // positions of one softmax tile, aligned to absolute position 0
constexpr int kKvLanes = 16;  // positions that one K vector covers
constexpr int kKvNext = 48;   // positions of the next tile to be fetched ahead

// One tile of cached positions of one KV head, and the (query, head) rows that look at it.
struct AttentionTile {
    const void* k[kKvTile / kKvLanes];  // [head_dim][k_stride], the first 16 of each row are the positions
    size_t k_stride;                    // elements
    const void* v[kKvTile];             // per position [head_dim padded to 16]
    const void* next_v[kKvNext];        // of the tile that this thread probably takes next, to be fetched; may be null
    int head_dim, v_dim;                // v_dim: head_dim rounded up to 16
    bool kv_bf16;                       // else float32
    float scale, soft_cap;              // soft_cap 0: none
};

struct AttentionRow {
    const float* q;  // [head_dim]
    int begin, end;  // visible positions of this tile, 0 <= begin < end <= kKvTile
    float* max;      // running maximum, -inf before the first tile
    float* sum;      // running sum of exp(score - max)
    float* acc;      // [v_dim] running sum of exp(score - max) * V
};

struct RopeTask {
    float* x;  // [num_heads * head_dim] of one token, rotated in place
    int num_heads, head_dim, rope_dim;
    const float* cos;  // [rope_dim / 2]
    const float* sin;
};

struct KvWriteTask {
    const float* k;  // [num_heads][head_dim] of one token
    const float* v;
    int num_heads, head_dim, v_dim;
    void* k_out;  // position's place in the first head's K; element d of head h lies at h * head_stride + d * k_stride
    void* v_out;
    size_t head_stride, k_stride;  // elements
    bool kv_bf16;
};

constexpr int kSumBlock = 64;  // weights that sampling sums in float32; blocks are summed in float64

enum class Gate : int { kSilu, kGelu, kGeluErf };  // kGelu: the tanh form

using Linear = void (*)(const LinearTask&);
using LinearByKind = Linear[static_cast<int>(WeightKind::kCount)];

// What one ISA offers. Every function computes the same bits in all tables (docs/kernels.md), only at different speed.
struct Kernels {
    const char* name;
    Activations exact;          // what this ISA multiplies with under numerics "exact"
    int linear_rows;            // rows of one LinearTask that are best: their activations stay in L2
    LinearByKind linear_float;  // null for integer kinds
    LinearByKind linear_int8;   // null for float kinds
    LinearByKind linear_bf16;   // null for float32 and float16
    // Rows of bfloat16 tiles as columns, each tile [16 pairs of k][16 rows][2], for products of 2 to 64 rows with 4-bit
    // weights, which may be faster so. Null: they are not.
    void (*to_columns)(const Quantised& x, int rows, uint16_t* columns);
    void (*dequantise_row)(const Matrix& w, int row, float* out);  // [cols]
    // One row, or its columns from `column` on: whole groups of 32, the last one excepted.
    void (*quantise)(const float* x, int cols, const Quantised& to, size_t row, size_t column);
    void (*round_bf16)(const float* x, int cols, const Quantised& to, size_t row, size_t column);
    void (*rms_norm)(const float* x, const float* weight, int width, float eps, float* out);  // one row, or a head
    void (*layer_norm)(const float* x, const float* weight, const float* bias, int width, float eps, float* out);
    void (*rope)(const RopeTask&);
    void (*write_kv)(const KvWriteTask&);
    void (*attend)(const AttentionTile&, const AttentionRow* rows, int num_rows);
    void (*attend_bf16)(const AttentionTile&, const AttentionRow* rows, int num_rows);  // bfloat16 K, V and products
    void (*widen)(AttentionTile&, int begin, int end, float* k, float* v);
    void (*attention_merge)(const AttentionRow& from, const AttentionRow& into, int v_dim);
    void (*attention_finish)(const AttentionRow& row, int head_dim, float* out);
    void (*gated_mul)(Gate, const float* gate, const float* up, size_t n, float* out);  // n a multiple of 16
    void (*activation)(Gate, const float* x, size_t n, float* out);
    void (*add)(const float* a, const float* b, size_t n, float* out);
    void (*scale)(const float* x, float factor, size_t n, float* out);
    void (*soft_cap)(const float* x, float cap, size_t n, float* out);
    // sampling, over rows of any length n
    int (*argmax)(const float* x, int n, float* best, bool* finite);
    void (*block_max)(const float* x, int n, float* out);  // [ceil(n / 64)]
    void (*softmax_terms)(const float* x, int n, float shift, float temperature, float* z, float* w, float* block_sums);
};

constexpr bool is_integer(WeightKind kind) { return kind >= WeightKind::kInt8; }
// Whether products with such weights read rounded rows.
static inline bool reads_quantised(WeightKind kind, Activations activations) {
    return is_integer(kind) || (kind == WeightKind::kBf16 && activations != Activations::kInt8);
}
// Into the forms that `to` has.
static inline void round_row(const Kernels& kernels, const float* x, int cols, const Quantised& to, size_t row,
                             size_t column) {
    if (to.q) kernels.quantise(x, cols, to, row, column);
    if (to.tiles) kernels.round_bf16(x, cols, to, row, column);
}

const Kernels& generic_kernels();
const Kernels& avx2_kernels();
const Kernels& avx512_kernels();
const Kernels& amx_kernels();
const Kernels& avx512_emulated_kernels();  // in test builds, see csrc/emulation/
const Kernels& amx_emulated_kernels();

}  // namespace octavo
