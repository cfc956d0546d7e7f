// Paged attention over one tile of 256 cached positions. Include one of simd/*.h first.
//
// Numerics, the same for one query and for many, whatever the blocks: per row and tile
//   score[t] = scale * sum over d ascending of q[d] k[t][d], one fma chain; soft cap; invisible positions -inf
//   m = max score; p[t] = exp(score[t] - m); sum of p in 16 running sums (lane = t mod 16), then as a tree
//   acc[d] = sum over t ascending of p[t] v[t][d], one fma chain
// and tiles are merged in ascending order (flash attention: Dao et al. 2022, arXiv:2205.14135). Tiles are aligned to
// absolute position 0, so neither chunks, prefix hits nor windows move their borders. Positions that a row does not see
// are never multiplied: a stale NaN in a freed block cannot reach it.
#pragma once

#include "math.h"

namespace {

constexpr int kMaxRows = OCTAVO_ATTENTION_ROWS;  // rows that share one pass over K and V: what the registers hold

// Elements of K or V, in lanes of any order (simd/*.h: load_bf16_fast), and how to get a vector into and out of it.
inline Vec load_kv(const float* p) { return load(p); }
inline Vec load_kv(const uint16_t* p) { return load_bf16_fast(p); }
template <class T>
inline Vec in_order(Vec x) {
    return sizeof(T) == 2 ? from_fast(x) : x;
}
template <class T>
inline Vec out_of_order(Vec x) {
    return sizeof(T) == 2 ? to_fast(x) : x;
}

// Its argument, unknown to the compiler: what is loaded by it is loaded again. Else GCC keeps broadcasts in registers,
// one too many for the accumulators, and an accumulator that lives in memory waits for itself.
inline size_t hidden(size_t index) {
    asm volatile("" : "+r"(index));
    return index;
}

struct RowBlock {
    const octavo::AttentionRow* row[kMaxRows];
    float p[kMaxRows][octavo::kKvTile];  // scores, then exp(score - max)
};

// q k of the positions of K vectors [s, end) for R rows, V vectors at a time as long as there are V; returns the first
// not done. V * R independent chains hide the latency.
template <class T, int R, int V>
[[gnu::noinline]] int dot_lanes(const octavo::AttentionTile& t, RowBlock& block, int s, int end) {
    const float* q[R];
    for (int r = 0; r < R; ++r) q[r] = block.row[r]->q;
    const int head_dim = t.head_dim;
    const size_t stride = t.k_stride;
    for (; s + V <= end; s += V) {
        const T* k[V];
        Vec sum[R][V];
        for (int v = 0; v < V; ++v) {
            k[v] = static_cast<const T*>(t.k[s + v]);
            for (int r = 0; r < R; ++r) sum[r][v] = zero();
        }
        for (int d = 0; d < head_dim; ++d)
            for (int v = 0; v < V; ++v) {
                const Vec kd = load_kv(k[v] + d * stride);
                const size_t again = hidden(static_cast<size_t>(d));
                for (int r = 0; r < R; ++r) sum[r][v] = fma(set1(q[r][again]), kd, sum[r][v]);
            }
        for (int r = 0; r < R; ++r)
            for (int v = 0; v < V; ++v) store(block.p[r] + (s + v) * kLanes, in_order<T>(sum[r][v]));
    }
    return s;
}

inline Vec cap_scores(const octavo::AttentionTile& t, Vec score) {
    return mul(tanh(mul(score, set1(1.0f / t.soft_cap))), set1(t.soft_cap));
}

// Scores of positions [base, base + 16), -inf where the row sees none.
inline Vec mask_scores(const octavo::AttentionRow& row, int base, Vec score) {
    if (row.begin <= base && row.end >= base + kLanes) return score;
    return select(lanes_between(row.begin - base, row.end - base), score, set1(-__builtin_inff()));
}

// Turns a row's products into scores, then into exp(score - max), and sets its maximum and sum.
inline void softmax_row(const octavo::AttentionTile& t, const octavo::AttentionRow& row, float* p) {
    const int first = row.begin / kLanes * kLanes;
    Vec largest = set1(-__builtin_inff());
    for (int i = first; i < row.end; i += kLanes) {
        Vec score = mul(load(p + i), set1(t.scale));
        if (t.soft_cap > 0.0f) score = cap_scores(t, score);
        score = mask_scores(row, i, score);
        store(p + i, score);
        largest = max(largest, score);
    }
    const Vec shift = set1(reduce_max(largest));
    Vec sum = zero();
    for (int i = first; i < row.end; i += kLanes) {
        const Vec e = exp(sub(load(p + i), shift));
        store(p + i, e);
        sum = add(sum, e);
    }
    *row.max = reduce_max(largest);
    *row.sum = reduce_add(sum);
}

// acc[d .. d + 16 C) += p[t] v[t] for t in [begin, end), R rows at once.
template <class T, int R, int C>
[[gnu::noinline]] void accumulate(const octavo::AttentionTile& t, RowBlock& block, int first_row, int d, int begin,
                                  int end) {
    Vec acc[R][C];
    const auto* p = block.p + first_row;
    for (int r = 0; r < R; ++r)
        for (int c = 0; c < C; ++c) acc[r][c] = out_of_order<T>(load(block.row[first_row + r]->acc + d + c * kLanes));
    for (int i = begin; i < end; ++i) {
        const T* row = static_cast<const T*>(t.v[i]) + d;
        for (int c = 0; c < C; ++c) {
            const Vec v = load_kv(row + c * kLanes);
            const size_t again = hidden(static_cast<size_t>(i));
            for (int r = 0; r < R; ++r) acc[r][c] = fma(set1(p[r][again]), v, acc[r][c]);
        }
    }
    for (int r = 0; r < R; ++r)
        for (int c = 0; c < C; ++c) store(block.row[first_row + r]->acc + d + c * kLanes, in_order<T>(acc[r][c]));
}

// The outputs [d, d + 16 C) of R rows: each row alone before and after the positions that all of them see.
template <class T, int R, int C>
inline void weighted_values(const octavo::AttentionTile& t, RowBlock& block, int d, int all_begin, int all_end) {
    const bool common = all_begin < all_end;
    for (int r = 0; r < R; ++r) {
        const octavo::AttentionRow& row = *block.row[r];
        for (int c = 0; c < C; ++c) store(row.acc + d + c * kLanes, zero());
        accumulate<T, 1, C>(t, block, r, d, row.begin, common ? all_begin : row.end);
    }
    if (!common) return;
    accumulate<T, R, C>(t, block, 0, d, all_begin, all_end);
    for (int r = 0; r < R; ++r) accumulate<T, 1, C>(t, block, r, d, all_end, block.row[r]->end);
}

template <class T, int R>
void attend_block(const octavo::AttentionTile& t, RowBlock& block) {
    int begin = octavo::kKvTile, end = 0;          // what any row sees
    int all_begin = 0, all_end = octavo::kKvTile;  // what every row sees
    for (int r = 0; r < R; ++r) {
        const octavo::AttentionRow& row = *block.row[r];
        begin = row.begin < begin ? row.begin : begin;
        end = row.end > end ? row.end : end;
        all_begin = row.begin > all_begin ? row.begin : all_begin;
        all_end = row.end < all_end ? row.end : all_end;
    }
    constexpr int kWide = R * 2 <= kMaxRows ? 2 : 1;  // few rows take two vectors at a time
    const int last = (end + kLanes - 1) / kLanes;
    const int s = dot_lanes<T, R, kWide>(t, block, begin / kLanes, last);
    if (s < last) dot_lanes<T, R, 1>(t, block, s, last);
    for (int r = 0; r < R; ++r) softmax_row(t, *block.row[r], block.p[r]);
    int d = 0;
    for (; d + kWide * kLanes <= t.v_dim; d += kWide * kLanes)
        weighted_values<T, R, kWide>(t, block, d, all_begin, all_end);
    for (; d < t.v_dim; d += kLanes) weighted_values<T, R, 1>(t, block, d, all_begin, all_end);
}

// As many blocks of R rows as there are, taken off the front.
template <class T, int R>
inline void attend_rows(const octavo::AttentionTile& t, const octavo::AttentionRow*& rows, int& num_rows,
                        RowBlock& block) {
    if constexpr (R <= kMaxRows)
        for (; num_rows >= R; rows += R, num_rows -= R) {
            for (int r = 0; r < R; ++r) block.row[r] = rows + r;
            attend_block<T, R>(t, block);
        }
}

template <class T>
void attend_as(const octavo::AttentionTile& t, const octavo::AttentionRow* rows, int num_rows) {
    RowBlock block;
    attend_rows<T, kMaxRows>(t, rows, num_rows, block);
    attend_rows<T, 6>(t, rows, num_rows, block);
    attend_rows<T, 4>(t, rows, num_rows, block);
    attend_rows<T, 3>(t, rows, num_rows, block);
    attend_rows<T, 2>(t, rows, num_rows, block);
    attend_rows<T, 1>(t, rows, num_rows, block);
}

// Sets max, sum and acc of each row to those of this tile alone.
void attend(const octavo::AttentionTile& t, const octavo::AttentionRow* rows, int num_rows) {
    t.kv_bf16 ? attend_as<uint16_t>(t, rows, num_rows) : attend_as<float>(t, rows, num_rows);
}

// Replaces the bfloat16 K and V of positions [begin, end) by float32 copies in k [256 / 16][head_dim][16] and
// v [256][v_dim]: with many rows it pays to convert once.
void widen(octavo::AttentionTile& t, int begin, int end, float* k, float* v) {
    for (int s = begin / kLanes; s * kLanes < end; ++s) {
        const uint16_t* from = static_cast<const uint16_t*>(t.k[s]);
        float* to = k + s * t.head_dim * kLanes;
        for (int d = 0; d < t.head_dim; ++d) store(to + d * kLanes, load_bf16(from + d * t.k_stride));
        t.k[s] = to;
    }
    for (int i = begin; i < end; ++i) {
        const uint16_t* from = static_cast<const uint16_t*>(t.v[i]);
        float* to = v + i * t.v_dim;
        for (int d = 0; d < t.v_dim; d += kLanes) store(to + d, load_bf16(from + d));
        t.v[i] = to;
    }
    t.k_stride = kLanes;
    t.kv_bf16 = false;
}

// Joins the next tile's result `from` to the running result `into`.
void attention_merge(const octavo::AttentionRow& from, const octavo::AttentionRow& into, int v_dim) {
    const float largest = *from.max > *into.max ? *from.max : *into.max;
    const Vec shift = set1(largest);
    const Vec old_factor = exp(sub(set1(*into.max), shift)), new_factor = exp(sub(set1(*from.max), shift));
    Vec sum = mul(set1(*into.sum), old_factor);
    sum = fma(set1(*from.sum), new_factor, sum);
    *into.max = largest;
    *into.sum = reduce_max(sum);  // all lanes are equal
    for (int d = 0; d < v_dim; d += kLanes)
        store(into.acc + d, fma(load(from.acc + d), new_factor, mul(load(into.acc + d), old_factor)));
}

// out = acc / sum
void attention_finish(const octavo::AttentionRow& row, int head_dim, float* out) {
    const Vec inverse = div(set1(1.0f), set1(*row.sum));
    int d = 0;
    for (; d + kLanes <= head_dim; d += kLanes) store(out + d, mul(load(row.acc + d), inverse));
    if (d < head_dim) store_tail(out + d, head_dim - d, mul(load(row.acc + d), inverse));
}

}  // namespace
