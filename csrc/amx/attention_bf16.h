// Paged attention with products in bfloat16 by AMX tiles. Numerics: ops/attention_bf16.h.
//
// A call brings K and V into the form of B operands once, then takes 32 rows at a time: scores of all positions that
// one of them sees, softmax, values. Each step is two tiles of rows times two of columns, so that tiles share their
// loads. Scores and weights of 32 rows fill 32 KB: the softmax finds them in L1.
#pragma once

#include "../ops/attention_bf16.h"
#include "linear_bf16.h"

namespace {

using octavo::AttentionRow;
using octavo::AttentionTile;

constexpr int kTileBytes = 1024;                    // of any operand, and of 16 x 16 sums
constexpr int kMaxTileDim = 256;                    // of heads that go through tiles
constexpr int kVectors = octavo::kKvTile / kLanes;  // of positions: tiles of scores in a row of tiles
constexpr int kSteps = octavo::kKvTile / kDotStep;  // of positions: tiles of weights in a row of tiles
constexpr int kAhead = octavo::kKvNext / kLanes;    // vectors of positions that are fetched ahead

// Per thread, not on the stack: that of a thread may be small.
struct alignas(64) TileScratch {
    static constexpr int kDimSteps = kMaxTileDim / kDotStep;
    // What an index counts, then the tile: B operands are [16 pairs][16][2], A operands [16][32].
    uint8_t k[kVectors * kDimSteps * kTileBytes];           // [16 positions][32 dims]
    uint8_t v[kMaxTileDim / kLanes * kSteps * kTileBytes];  // [16 dims][32 positions]
    uint8_t q[2 * kDimSteps * kTileBytes];                  // [16 rows][32 dims]
    uint8_t scores[2 * kVectors * kTileBytes];              // [16 rows][16 positions] of float32 [16][16]
    uint8_t values[4 * kTileBytes];                         // [16 rows][16 dims] of float32 [16][16]
};

// A row of tiles (A), or a column (B), along the dimension that is summed.
struct Operand {
    const uint8_t* data;
    int tile, step;  // bytes to the other row or column of tiles, and to the next one along the sum
};

// Sums of RowTiles x ColumnTiles tiles over `steps` of 32.
template <int RowTiles, int ColumnTiles>
inline void multiply_tiles(Operand a, Operand b, int steps, uint8_t* out, int out_row, int out_column) {
    tiles::zero<0>();
    if constexpr (ColumnTiles == 2) tiles::zero<1>();
    if constexpr (RowTiles == 2) tiles::zero<2>();
    if constexpr (RowTiles == 2 && ColumnTiles == 2) tiles::zero<3>();
    for (int step = 0; step < steps; ++step, a.data += a.step, b.data += b.step) {
        tiles::load<6>(b.data, kTileStride);
        tiles::load<4>(a.data, kTileStride);
        tiles::multiply_bf16<0, 4, 6>();
        if constexpr (RowTiles == 2) {
            tiles::load<5>(a.data + a.tile, kTileStride);
            tiles::multiply_bf16<2, 5, 6>();
        }
        if constexpr (ColumnTiles == 2) {
            tiles::load<7>(b.data + b.tile, kTileStride);
            tiles::multiply_bf16<1, 4, 7>();
            if constexpr (RowTiles == 2) tiles::multiply_bf16<3, 5, 7>();
        }
    }
    tiles::store<0>(out, kTileStride);
    if constexpr (ColumnTiles == 2) tiles::store<1>(out + out_column, kTileStride);
    if constexpr (RowTiles == 2) tiles::store<2>(out + out_row, kTileStride);
    if constexpr (RowTiles == 2 && ColumnTiles == 2) tiles::store<3>(out + out_row + out_column, kTileStride);
}

// Lane i: word i of `even`, then of `odd`.
inline __m512i word_pairs(const uint16_t* even, const uint16_t* odd) {
    const __m512i low = _mm512_cvtepu16_epi32(load_words(even)), high = _mm512_cvtepu16_epi32(load_words(odd));
    return _mm512_or_si512(low, _mm512_slli_epi32(high, 16));
}

alignas(64) const uint16_t kZeroWords[kMaxTileDim] = {};

constexpr int kWordsOfLine = 32;
inline void fetch(const uint16_t* p) { _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T0); }

// Positions that any row of `rows` sees.
struct Span {
    Span(const AttentionRow* rows, int num_rows) : begin(rows[0].begin), end(rows[0].end), same(true) {
        for (int r = 1; r < num_rows; ++r) {
            same = same && rows[r].begin == rows[0].begin && rows[r].end == rows[0].end;
            begin = rows[r].begin < begin ? rows[r].begin : begin;
            end = rows[r].end > end ? rows[r].end : end;
        }
    }
    int first_step() const { return begin / kDotStep; }
    int last_step() const { return (end + kDotStep - 1) / kDotStep; }

    int begin, end;
    bool same;  // all rows see the same
};

// An eighth of the keys that this position's lies among.
inline void fetch_key(const AttentionTile& t, int position) {
    const uint16_t* k = static_cast<const uint16_t*>(t.k[position / kLanes]);
    const int part = position % kLanes / 2;
    for (int d = part * t.head_dim / 8; d < (part + 1) * t.head_dim / 8; d += 2) fetch(k + d * t.k_stride);
}

// Vectors of K that hold no position of the span are zero. Its last fetches are of the next tile's first values.
void pack_keys(const AttentionTile& t, const Span& span, int dim_steps, TileScratch& scratch) {
    const int first = span.begin / kLanes, last = (span.end + kLanes - 1) / kLanes;
    int next_value = 0, next_dim = 0;
    for (int s = 2 * span.first_step(); s < 2 * span.last_step(); ++s) {
        const bool seen = s >= first && s < last;
        const uint16_t* k = seen ? static_cast<const uint16_t*>(t.k[s]) : kZeroWords;
        const uint16_t* next = seen && s + kAhead < last ? static_cast<const uint16_t*>(t.k[s + kAhead]) : nullptr;
        const size_t stride = seen ? t.k_stride : 0;
        uint8_t* out = scratch.k + s * dim_steps * kTileBytes;
        int d = 0;
        for (; d + 2 <= t.head_dim; d += 2, out += kTileStride) {
            if (next) {
                fetch(next + d * stride);
            } else if (next_value < octavo::kKvNext && t.next_v[next_value]) {
                fetch(static_cast<const uint16_t*>(t.next_v[next_value]) + next_dim);
                if ((next_dim += kWordsOfLine) >= t.v_dim) next_dim = 0, ++next_value;
            }
            _mm512_storeu_si512(out, word_pairs(k + d * stride, k + (d + 1) * stride));
        }
        for (; d < dim_steps * kDotStep; d += 2, out += kTileStride)
            _mm512_storeu_si512(out, word_pairs(d < t.head_dim ? k + d * stride : kZeroWords, kZeroWords));
    }
}

// Positions outside the span are zero. Returns whether all values are finite. Its last fetches are of the first keys,
// which pack_keys takes next.
bool pack_values(const AttentionTile& t, const Span& span, TileScratch& scratch) {
    const int all_fetched = span.end - kAhead * kLanes > span.begin ? span.end - kAhead * kLanes : span.begin;
    const __m512i magnitude = _mm512_set1_epi32(0x7FFF7FFF);
    __m512i largest = _mm512_setzero_si512();
    for (int i = span.first_step() * kDotStep; i < span.last_step() * kDotStep; i += 2) {
        const bool first = i >= span.begin && i < span.end, second = i + 1 >= span.begin && i + 1 < span.end;
        const uint16_t* even = first ? static_cast<const uint16_t*>(t.v[i]) : kZeroWords;
        const uint16_t* odd = second ? static_cast<const uint16_t*>(t.v[i + 1]) : kZeroWords;
        const bool more = first && i + 1 < all_fetched;
        const uint16_t* next = more ? static_cast<const uint16_t*>(t.v[i + kAhead * kLanes]) : even;
        const uint16_t* next_odd = more ? static_cast<const uint16_t*>(t.v[i + 1 + kAhead * kLanes]) : odd;
        if (first && i >= all_fetched) fetch_key(t, span.begin + i - all_fetched);
        uint8_t* out = scratch.v + i / kDotStep * kTileBytes + i % kDotStep / 2 * kTileStride;
        for (int d = 0; d < t.v_dim; d += kLanes, out += kSteps * kTileBytes) {
            fetch(d / kLanes % 2 ? next_odd + d : next + d);  // two of these are a line
            const __m512i pairs = word_pairs(even + d, odd + d);
            _mm512_storeu_si512(out, pairs);
            largest = _mm512_max_epu16(largest, _mm512_and_si512(pairs, magnitude));
        }
    }
    uint16_t words[2 * kLanes];
    _mm512_storeu_si512(words, largest);
    bool finite = true;
    for (const uint16_t word : words) finite = finite && word < 0x7F80;
    return finite;
}

// q' of up to 32 rows as A operands.
void pack_queries(const AttentionTile& t, const AttentionRow* rows, int num_rows, int dim_steps, TileScratch& scratch) {
    const Vec scale = set1(t.scale);
    const auto load_part = [&](const float* q, int d) {
        if (d + kLanes <= t.head_dim) return load(q + d);
        return d < t.head_dim ? load_tail(q + d, t.head_dim - d, 0.0f) : zero();
    };
    for (int r = 0; r < num_rows; ++r) {
        uint8_t* out = scratch.q + r / kTileRows * dim_steps * kTileBytes + r % kTileRows * kTileStride;
        for (int d = 0; d < t.head_dim; d += kDotStep, out += kTileBytes)
            store_rounded(reinterpret_cast<uint16_t*>(out), mul(load_part(rows[r].q, d), scale),
                          mul(load_part(rows[r].q, d + kLanes), scale));
    }
}

// A row's scores, or the weights of 32 positions in the place of the first 16 of their scores: both are a line of a
// row.
struct ScoreRow {
    ScoreRow(TileScratch& scratch, int row)
        : first(scratch.scores + row / kTileRows * kVectors * kTileBytes + row % kTileRows * kTileStride) {}
    float* at(int vector) const { return reinterpret_cast<float*>(first + vector * kTileBytes); }
    uint16_t* weights(int step) const { return reinterpret_cast<uint16_t*>(at(2 * step)); }

    uint8_t* first;
};

// The maximum of what the row sees. Scores are capped in place.
inline float largest_score(const AttentionTile& t, const AttentionRow& row, const ScoreRow& scores) {
    Vec largest = set1(-__builtin_inff());
    const auto take_masked = [&](int s) {
        Vec score = load(scores.at(s));
        if (t.soft_cap > 0.0f) store(scores.at(s), score = cap_scores(t, score));
        largest = max(largest, mask_scores(row, s * kLanes, score));
    };
    int s = row.begin / kLanes;
    const int whole = t.soft_cap > 0.0f ? s : row.end / kLanes;  // up to here nothing is masked, but for the first one
    take_masked(s++);
    for (; s < whole; ++s) largest = max(largest, load(scores.at(s)));
    for (; s * kLanes < row.end; ++s) take_masked(s);
    return reduce_max(largest);
}

// Turns scores into weights: all steps of the span, those zero that the row does not see. Their sum.
inline float weigh_scores(const AttentionRow& row, const Span& span, const ScoreRow& scores) {
    const Vec shift = exponent_shift(*row.max), log2_e = set1(kLog2E);
    Vec sum = zero();
    const auto weigh = [&](Vec score) {
        const Vec p = exp2(fma(score, log2_e, shift));
        sum = add(sum, p);
        return p;
    };
    const auto weigh_masked = [&](int step) {
        Vec p[2] = {zero(), zero()};
        for (int half = 0; half < 2 && row.begin < (step + 1) * kDotStep && row.end > step * kDotStep; ++half) {
            const int s = 2 * step + half;
            p[half] = weigh(mask_scores(row, s * kLanes, load(scores.at(s))));
        }
        store_rounded(scores.weights(step), p[0], p[1]);
    };
    int step = span.first_step();
    for (; step * kDotStep < row.begin; ++step) weigh_masked(step);
    for (; (step + 1) * kDotStep <= row.end; ++step) {
        const Vec first = weigh(load(scores.at(2 * step))), second = weigh(load(scores.at(2 * step + 1)));
        store_rounded(scores.weights(step), first, second);
    }
    for (; step < span.last_step(); ++step) weigh_masked(step);
    return reduce_add(sum);
}

void softmax_tiles(const AttentionTile& t, const AttentionRow* rows, int num_rows, const Span& span,
                   TileScratch& scratch) {
    // all maxima first: the exponentials of a row wait for its own
    for (int r = 0; r < num_rows; ++r) *rows[r].max = largest_score(t, rows[r], ScoreRow(scratch, r));
    for (int r = 0; r < num_rows; ++r) {
        const AttentionRow row = rows[r];  // a copy, which no store can change
        *row.sum = weigh_scores(row, span, ScoreRow(scratch, r));
    }
}

// 16 or 32 outputs of all rows, from d on.
template <int RowTiles, int ColumnTiles>
inline void weigh_values(const AttentionRow* rows, int num_rows, const Span& span, int d, TileScratch& scratch) {
    const int first = span.first_step();
    const Operand weights{scratch.scores + 2 * first * kTileBytes, kVectors * kTileBytes, 2 * kTileBytes};
    const Operand values{scratch.v + (d / kLanes * kSteps + first) * kTileBytes, kSteps * kTileBytes, kTileBytes};
    multiply_tiles<RowTiles, ColumnTiles>(weights, values, span.last_step() - first, scratch.values, 2 * kTileBytes,
                                          kTileBytes);
    for (int r = 0; r < num_rows; ++r) {
        const uint8_t* from = scratch.values + r / kTileRows * 2 * kTileBytes + r % kTileRows * kTileStride;
        for (int c = 0; c < ColumnTiles; ++c, from += kTileBytes)
            store(rows[r].acc + d + c * kLanes, add(load(reinterpret_cast<const float*>(from)), zero()));  // no -0
    }
}

// Up to 16 * RowTiles rows against the K and V of the scratch.
template <int RowTiles>
void attend_row_tiles(const AttentionTile& t, const AttentionRow* rows, int num_rows, TileScratch& scratch) {
    const Span span(rows, num_rows);
    const int dim_steps = (t.head_dim + kDotStep - 1) / kDotStep, column_bytes = dim_steps * kTileBytes;
    pack_queries(t, rows, num_rows, dim_steps, scratch);
    for (int s = 2 * span.first_step(); s < 2 * span.last_step(); s += 2)
        multiply_tiles<RowTiles, 2>({scratch.q, column_bytes, kTileBytes},
                                    {scratch.k + s * column_bytes, column_bytes, kTileBytes}, dim_steps,
                                    scratch.scores + s * kTileBytes, kVectors * kTileBytes, kTileBytes);
    softmax_tiles(t, rows, num_rows, span, scratch);
    int d = 0;
    for (; d + 2 * kLanes <= t.v_dim; d += 2 * kLanes) weigh_values<RowTiles, 2>(rows, num_rows, span, d, scratch);
    if (d < t.v_dim) weigh_values<RowTiles, 1>(rows, num_rows, span, d, scratch);
}

void attend_bf16_tiles(const AttentionTile& t, const AttentionRow* rows, int num_rows) {
    if (t.head_dim > kMaxTileDim) return attend_bf16(t, rows, num_rows);
    static thread_local TileScratch scratch;
    const Span span(rows, num_rows);
    if (!pack_values(t, span, scratch) && !span.same) {
        // 0 * infinity is NaN: only rows that see the same positions may share such values.
        for (int r = 0, n; r < num_rows; r += n) {
            for (n = 1; r + n < num_rows && Span(rows + r, n + 1).same;) ++n;
            attend_bf16_tiles(t, rows + r, n);
        }
        return;
    }
    pack_keys(t, span, (t.head_dim + kDotStep - 1) / kDotStep, scratch);
    int configured = 0;
    for (int r = 0; r < num_rows; r += 2 * kTileRows) {
        const int n = num_rows - r < 2 * kTileRows ? num_rows - r : 2 * kTileRows;
        if (configured != n) tiles::load_config(kConfigs.of[configured = n]);
        n > kTileRows ? attend_row_tiles<2>(t, rows + r, n, scratch) : attend_row_tiles<1>(t, rows + r, n, scratch);
    }
    tiles::release();
}

}  // namespace
