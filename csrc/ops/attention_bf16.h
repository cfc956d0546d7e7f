// Paged attention over one tile of 256 cached positions with products in bfloat16. Include one of simd/*.h first and
// define OCTAVO_ATTENTION_ROWS. This is the truth that amx/attention_bf16.h, the same by tiles, must match bit for bit.
//
// Numerics, the same for one query and for many, whatever the blocks and the other rows of a call:
//   q' = bf16(q * scale)
//   score[t] = 0, then for each 32 d ascending: score += even + odd, two fma chains from 0 over the even and the odd d
//     of q'[d] k[t][d]; soft cap; invisible positions -inf
//   m = max score; p[t] = 2^((score[t] - m) log2 e); sum of p in 16 running sums (lane = t mod 16), then as a tree
//   acc[d] = 0, then for each 32 t ascending: acc += even + odd, two fma chains from 0 over the even and the odd t of
//     bf16(p[t]) v[t][d]; a result of -0 is +0
// The 32 t are aligned to the tile. Roundings to bfloat16 are to nearest even, denormals are zero.
//
// A position that a row does not see has p = 0. Tiles multiply it where another row sees it, this file skips it. With
// finite V that can only differ in the sign of a zero: after an underflow a sum may be -0, to which +0 may be added or
// not. Zeros of either sign add alike, and the last rule makes the result one.
#pragma once

#include "attention.h"

namespace {

constexpr int kDotStep = 32;  // dimensions or positions that a tile multiplies at once
constexpr int kChainRows = OCTAVO_ATTENTION_ROWS < 2 ? 1 : OCTAVO_ATTENTION_ROWS / 2;  // of two chains each
constexpr float kLog2E = 1.44269504f;

// 2^x for x <= 127, relative error below 4e-6: far below a rounding to bf16. 0 below -126; NaN stays NaN.
inline Vec exp2(Vec x) {
    x = max(set1(-127.0f), x);  // 2^-127 is a denormal, so zero; max returns its second argument if that is NaN
    const Vec r = from_nearest(x);
    Vec p = set1(0.00958285295f);  // interpolates 2^r, |r| <= 1/2, exact at 0
    p = fma(p, r, set1(0.0559064262f));
    p = fma(p, r, set1(0.240240991f));
    p = fma(p, r, set1(0.693124175f));
    p = fma(p, r, set1(1.0f));
    return mul_pow2(p, sub(x, r));
}

// What makes exponents of scores: fma(score, log2 e, shift).
inline Vec exponent_shift(float largest) { return mul(set1(largest), set1(-kLog2E)); }

struct Bf16Block {
    float p[kChainRows][octavo::kKvTile];  // scores, then bf16(p)
    float q[kChainRows][kDotStep];         // 32 dimensions of q'
};

// Dimensions [d, d + n) of q', n <= 32.
inline void round_query(const float* q, int d, int n, float scale, float* out) {
    for (int i = 0; i < n; i += kLanes) {
        const Vec x = n - i < kLanes ? load_tail(q + d + i, n - i, 0.0f) : load(q + d + i);
        store(out + i, round_to_bf16(mul(x, set1(scale))));
    }
}

// Adds dimensions [d, d + n) of 16 positions, K vector `s`, to the scores of R rows.
template <int R>
inline void add_scores(const octavo::AttentionTile& t, Bf16Block& block, int s, int d, int n) {
    const uint16_t* k = static_cast<const uint16_t*>(t.k[s]) + d * t.k_stride;
    Vec even[R], odd[R];
    for (int r = 0; r < R; ++r) even[r] = odd[r] = zero();
    for (int i = 0; i < n; i += 2) {
        const Vec first = load_bf16(k + i * t.k_stride);
        for (int r = 0; r < R; ++r) even[r] = fma(set1(block.q[r][i]), first, even[r]);
        if (i + 1 == n) break;
        const Vec second = load_bf16(k + (i + 1) * t.k_stride);
        for (int r = 0; r < R; ++r) odd[r] = fma(set1(block.q[r][i + 1]), second, odd[r]);
    }
    for (int r = 0; r < R; ++r) {
        float* score = block.p[r] + s * kLanes;
        store(score, add(load(score), add(even[r], odd[r])));
    }
}

// Turns a row's scores into bf16(p) and sets its maximum and sum.
inline void softmax_row_bf16(const octavo::AttentionTile& t, const octavo::AttentionRow& row, float* p) {
    const int first = row.begin / kLanes * kLanes;
    Vec largest = set1(-__builtin_inff());
    for (int i = first; i < row.end; i += kLanes) {
        const Vec score = mask_scores(row, i, t.soft_cap > 0.0f ? cap_scores(t, load(p + i)) : load(p + i));
        store(p + i, score);
        largest = max(largest, score);
    }
    *row.max = reduce_max(largest);
    const Vec shift = exponent_shift(*row.max);
    Vec sum = zero();
    for (int i = first; i < row.end; i += kLanes) {
        const Vec e = exp2(fma(load(p + i), set1(kLog2E), shift));
        store(p + i, round_to_bf16(e));
        sum = add(sum, e);
    }
    *row.sum = reduce_add(sum);
}

// acc[d .. d + 16) += even + odd of positions [begin, end), all of one 32, for R rows that see them.
template <int R>
inline void add_values(const octavo::AttentionTile& t, const octavo::AttentionRow* rows,
                       const float (*p)[octavo::kKvTile], int d, int begin, int end) {
    Vec even[R], odd[R];
    for (int r = 0; r < R; ++r) even[r] = odd[r] = zero();
    for (int i = begin / 2 * 2; i < end; i += 2) {
        if (i >= begin) {
            const Vec v = load_bf16(static_cast<const uint16_t*>(t.v[i]) + d);
            for (int r = 0; r < R; ++r) even[r] = fma(set1(p[r][i]), v, even[r]);
        }
        if (i + 1 == end) break;
        const Vec v = load_bf16(static_cast<const uint16_t*>(t.v[i + 1]) + d);
        for (int r = 0; r < R; ++r) odd[r] = fma(set1(p[r][i + 1]), v, odd[r]);
    }
    for (int r = 0; r < R; ++r) store(rows[r].acc + d, add(load(rows[r].acc + d), add(even[r], odd[r])));
}

// Positions [base, base + 32) of all outputs of R rows: at once if all of them see the same ones, else each row alone.
template <int R>
inline void add_value_step(const octavo::AttentionTile& t, const octavo::AttentionRow* rows, const Bf16Block& block,
                           int base) {
    int begin[R], end[R];
    bool same = true;
    for (int r = 0; r < R; ++r) {
        begin[r] = rows[r].begin > base ? rows[r].begin : base;
        end[r] = rows[r].end < base + kDotStep ? rows[r].end : base + kDotStep;
        same = same && begin[r] == begin[0] && end[r] == end[0];
    }
    for (int d = 0; d < t.v_dim; d += kLanes) {
        if (same) {
            if (begin[0] < end[0]) add_values<R>(t, rows, block.p, d, begin[0], end[0]);
        } else {
            for (int r = 0; r < R; ++r)
                if (begin[r] < end[r]) add_values<1>(t, rows + r, block.p + r, d, begin[r], end[r]);
        }
    }
}

template <int R>
void attend_bf16_rows(const octavo::AttentionTile& t, const octavo::AttentionRow* rows, Bf16Block& block) {
    int begin = octavo::kKvTile, end = 0;  // what any row sees
    for (int r = 0; r < R; ++r) {
        begin = rows[r].begin < begin ? rows[r].begin : begin;
        end = rows[r].end > end ? rows[r].end : end;
    }
    for (int r = 0; r < R; ++r)
        for (int i = begin / kLanes * kLanes; i < end; i += kLanes) store(block.p[r] + i, zero());
    for (int d = 0; d < t.head_dim; d += kDotStep) {
        const int n = t.head_dim - d < kDotStep ? t.head_dim - d : kDotStep;
        for (int r = 0; r < R; ++r) round_query(rows[r].q, d, n, t.scale, block.q[r]);
        for (int s = begin / kLanes; s * kLanes < end; ++s) add_scores<R>(t, block, s, d, n);
    }
    for (int r = 0; r < R; ++r) {
        softmax_row_bf16(t, rows[r], block.p[r]);
        for (int d = 0; d < t.v_dim; d += kLanes) store(rows[r].acc + d, zero());
    }
    for (int base = begin / kDotStep * kDotStep; base < end; base += kDotStep) add_value_step<R>(t, rows, block, base);
    for (int r = 0; r < R; ++r)
        for (int d = 0; d < t.v_dim; d += kLanes) store(rows[r].acc + d, add(load(rows[r].acc + d), zero()));
}

// Sets max, sum and acc of each row to those of this tile alone. K and V are bfloat16.
void attend_bf16(const octavo::AttentionTile& t, const octavo::AttentionRow* rows, int num_rows) {
    Bf16Block block;
    int r = 0;
    for (; r + kChainRows <= num_rows; r += kChainRows) attend_bf16_rows<kChainRows>(t, rows + r, block);
    for (; r < num_rows; ++r) attend_bf16_rows<1>(t, rows + r, block);
}

}  // namespace
