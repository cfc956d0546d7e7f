// Integer weights as bfloat16 tiles: as B operands, and 4-bit ones also as A operands. Include simd/avx512.h first.
#pragma once

#include "../avx512/step_bytes.h"
#include "../ops/linear_bf16.h"

namespace {

using octavo::kGroup;
using octavo::kTileRows;
using octavo::WeightKind;

constexpr int kTileWords = kTileRows * kGroup;  // 1 KB: of an A operand [16][32], of a B operand [16 pairs of k][16][2]
constexpr int kTileStride = 64;                 // bytes
constexpr int kLine = 64;                       // bytes that a prefetch brings

inline __m512i load_register(const void* p) { return _mm512_loadu_si512(p); }
inline void prefetch(const uint8_t* p) { _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T0); }
// Lines [first, last) of `bytes` bytes.
inline void prefetch_lines(const uint8_t* p, int first, int last, int bytes) {
    for (int line = first; line < last && line * kLine < bytes; ++line) prefetch(p + line * kLine);
}
inline void store_rounded(uint16_t* row, Vec first, Vec second) {
    _mm512_storeu_si512(row, (__m512i)_mm512_cvtne2ps_pbh(second, first));
}

// ops/elementwise.h, round_bf16.
void round_pairs(const float* x, int cols, const octavo::Quantised& to, size_t row, size_t column) {
    for (size_t tile = column / kGroup; cols > 0; ++tile, cols -= kGroup, x += kGroup)
        store_rounded(to.tiles + tile_offset(to, row, tile), load(x), cols > kLanes ? load(x + kLanes) : zero());
}

// What the nibbles of a kind stand for.
template <WeightKind Kind>
inline Vec nibble_values() {
    if constexpr (IntFormat<Kind>::kLayout.codebook) return load_i8(octavo::kCodeLevels);
    return _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
}

// A register of the group holds 8 k of a column per lane; lanes are doubled, so that one lane of a pair picks the even
// k and the other the odd k, and a rounded register is a row of the tile.
template <WeightKind Kind>
inline void unpack_nibbles(PackedGroup from, const uint8_t* ahead, uint16_t* tile) {
    using Format = IntFormat<Kind>;
    const __m512i lower = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
    const __m512i upper = _mm512_setr_epi32(8, 8, 9, 9, 10, 10, 11, 11, 12, 12, 13, 13, 14, 14, 15, 15);
    const Vec values = nibble_values<Kind>();
    const Vec d = scale_of<Kind>(from, 0), m = minimum_of<Kind>(from, 0);
    const Vec d_lower = _mm512_permutexvar_ps(lower, d), d_upper = _mm512_permutexvar_ps(upper, d);
    const Vec m_lower = _mm512_permutexvar_ps(lower, m), m_upper = _mm512_permutexvar_ps(upper, m);
    // Where the two k of a row's pair begin in a lane: bytes hold k and k + 16 (ops/types.h).
    const __m512i shifts[4] = {
        _mm512_setr_epi32(0, 8, 0, 8, 0, 8, 0, 8, 0, 8, 0, 8, 0, 8, 0, 8),
        _mm512_setr_epi32(16, 24, 16, 24, 16, 24, 16, 24, 16, 24, 16, 24, 16, 24, 16, 24),
        _mm512_setr_epi32(4, 12, 4, 12, 4, 12, 4, 12, 4, 12, 4, 12, 4, 12, 4, 12),
        _mm512_setr_epi32(20, 28, 20, 28, 20, 28, 20, 28, 20, 28, 20, 28, 20, 28, 20, 28),
    };
    prefetch(ahead);
    for (int i = 0; i < 4; ++i) {
        prefetch_lines(ahead, i + 1, i + 2, Format::kGroupBytes);
        const __m512i eight = load_register(from.group + Format::kScaleBytes + i * 64);
        const __m512i a = _mm512_permutexvar_epi32(lower, eight), b = _mm512_permutexvar_epi32(upper, eight);
        for (int r = 0; r < 4; ++r) {  // the permutation looks up values[low four bits of the lane]
            const Vec qa = _mm512_permutexvar_ps(_mm512_srlv_epi32(a, shifts[r]), values);
            const Vec qb = _mm512_permutexvar_ps(_mm512_srlv_epi32(b, shifts[r]), values);
            const int row = r / 2 * 8 + i * 2 + r % 2;
            store_rounded(tile + row * 2 * kLanes, fma(qa, d_lower, m_lower), fma(qb, d_upper, m_upper));
        }
    }
}

// Other integers: 16 bytes are 4 columns of 4 k, in order; rounded, the pairs of two rows alternate.
template <WeightKind Kind>
inline void unpack_bytes(PackedGroup from, const uint8_t* ahead, uint16_t* tile) {
    using Format = IntFormat<Kind>;
    constexpr int kParts = Format::kParts;
    Vec scale[kParts][4], minimum[kParts][4];  // of columns 4 c, 4 c + 1, ..., four times each
    for (int part = 0; part < kParts; ++part) {
        const Vec d = scale_of<Kind>(from, part), m = minimum_of<Kind>(from, part);
        for (int c = 0; c < 4; ++c) {
            const __m512i columns = _mm512_add_epi32(_mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3),
                                                     _mm512_set1_epi32(4 * c));
            scale[part][c] = _mm512_permutexvar_ps(columns, d);
            if (Format::kHasOffset) minimum[part][c] = _mm512_permutexvar_ps(columns, m);
        }
    }
    const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    const __m512i odd = _mm512_setr_epi32(1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
    const uint8_t* w = from.group + Format::kScaleBytes;
    prefetch(ahead);
    steps<8>([&]<int I>() {
        constexpr int kPart = I * kParts / 8;
        prefetch_lines(ahead, I + 1, I + 2, Format::kGroupBytes);
        alignas(64) uint8_t bytes[64];
        const uint8_t* at = bytes;
        if constexpr (Format::kLayout.low_bits == 8)
            at = w + I * 64;
        else
            _mm512_storeu_si512(bytes, signed_bytes<Kind, I>(w));
        Vec x[4];
        for (int c = 0; c < 4; ++c) {
            const Vec q = load_i8(reinterpret_cast<const int8_t*>(at) + 16 * c);
            x[c] = Format::kHasOffset ? fma(q, scale[kPart][c], minimum[kPart][c]) : mul(q, scale[kPart][c]);
        }
        const __m512i first = (__m512i)_mm512_cvtne2ps_pbh(x[1], x[0]),
                      second = (__m512i)_mm512_cvtne2ps_pbh(x[3], x[2]);
        _mm512_storeu_si512(tile + I * 4 * kLanes, _mm512_permutex2var_epi32(first, even, second));
        _mm512_storeu_si512(tile + (I * 4 + 2) * kLanes, _mm512_permutex2var_epi32(first, odd, second));
    });
}

// One group of 32 k and 16 columns as a B operand. ahead: another group, to be fetched meanwhile.
template <WeightKind Kind>
inline void unpack_tile(PackedGroup from, const uint8_t* ahead, uint16_t* tile) {
    if constexpr (octavo::is_int4(Kind))
        unpack_nibbles<Kind>(from, ahead, tile);
    else
        unpack_bytes<Kind>(from, ahead, tile);
}

// Operands of the permutations of unpack_columns: 4 bytes of one column and 4 of the next, in turns;
alignas(64) constexpr uint8_t kAlternate[64] = {
    0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15, 0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15,
    0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15, 0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15};
// the first halves of two registers, and the second ones, 16 bytes in turns; shifts that bring down high nibbles.
alignas(64) constexpr int64_t kFirstHalves[8] = {0, 1, 8, 9, 2, 3, 10, 11};
alignas(64) constexpr int64_t kSecondHalves[8] = {4, 5, 12, 13, 6, 7, 14, 15};
alignas(64) constexpr int64_t kHighNibbles[8] = {0, 0, 0, 0, 4, 4, 4, 4};

// One group of 4-bit weights as an A operand: a row is a column of W, whose 32 k share a scale. So its 16 possible
// values are rounded once and looked up, two columns in one table: 60 % of the work that a B operand takes.
template <WeightKind Kind>
inline void unpack_columns(PackedGroup from, const uint8_t* ahead, uint16_t* tile) {
    using Format = IntFormat<Kind>;
    alignas(64) float scale[kLanes], minimum[kLanes];
    store(scale, scale_of<Kind>(from, 0));
    store(minimum, minimum_of<Kind>(from, 0));

    // The 32 bytes of a pair of columns, alternating, pairs 0 2 4 6 1 3 5 7.
    __m512i k4[4];  // 8 bytes are 2 columns of k = 4 i .. 4 i + 3, and + 16 in the high nibbles
    for (int i = 0; i < 4; ++i)
        k4[i] =
            _mm512_shuffle_epi8(load_register(from.group + Format::kScaleBytes + i * 64), load_register(kAlternate));
    alignas(64) uint8_t pairs[8][32];
    for (int odd = 0; odd < 2; ++odd) {
        const __m512i low = odd ? _mm512_unpackhi_epi64(k4[0], k4[1]) : _mm512_unpacklo_epi64(k4[0], k4[1]);
        const __m512i high = odd ? _mm512_unpackhi_epi64(k4[2], k4[3]) : _mm512_unpacklo_epi64(k4[2], k4[3]);
        _mm512_storeu_si512(pairs[4 * odd], _mm512_permutex2var_epi64(low, load_register(kFirstHalves), high));
        _mm512_storeu_si512(pairs[4 * odd + 2], _mm512_permutex2var_epi64(low, load_register(kSecondHalves), high));
    }

    // Broadcasts from memory cost nothing here; GCC would take the values from registers, through the busiest port.
    __asm__ volatile("" ::: "memory");
    const Vec values = nibble_values<Kind>();
    const __m512i nibbles = _mm512_set1_epi32(0x0F0F0F0F), second_table = _mm512_set1_epi32(0x10001000);
    for (int i = 0; i < 8; ++i) {
        prefetch_lines(ahead, i, i + 1, Format::kGroupBytes);
        const int column = i < 4 ? 4 * i : 4 * (i - 4) + 2;
        const Vec first = fma(values, set1(scale[column]), set1(minimum[column]));
        const Vec second = fma(values, set1(scale[column + 1]), set1(minimum[column + 1]));
        const __m512i table = (__m512i)_mm512_cvtne2ps_pbh(second, first);
        const __m256i bytes = _mm256_load_si256(reinterpret_cast<const __m256i*>(pairs[i]));
        const __m512i shifted = _mm512_srlv_epi64(_mm512_broadcast_i64x4(bytes), load_register(kHighNibbles));
        // Words of k: the first column's index low, the second's, in its half of the table, high.
        const __m512i index = _mm512_or_si512(_mm512_and_si512(shifted, nibbles), second_table);
        uint16_t* row = tile + column * kGroup;
        _mm512_storeu_si512(row, _mm512_permutexvar_epi16(index, table));
        _mm512_storeu_si512(row + kGroup, _mm512_permutexvar_epi16(_mm512_srli_epi16(index, 8), table));
    }
}

// Rows become columns, of 16 x 16 words of 32 bits.
inline void transpose(__m512i (&x)[16]) {
    __m512i y[16];
    for (int i = 0; i < 16; i += 2) {
        y[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]);
        y[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {  // x[4 a + b], 128 bits c: column 4 c + b of rows 4 a .. 4 a + 3
        x[i] = _mm512_unpacklo_epi64(y[i], y[i + 2]);
        x[i + 1] = _mm512_unpackhi_epi64(y[i], y[i + 2]);
        x[i + 2] = _mm512_unpacklo_epi64(y[i + 1], y[i + 3]);
        x[i + 3] = _mm512_unpackhi_epi64(y[i + 1], y[i + 3]);
    }
    for (int b = 0; b < 4; ++b) {
        const __m512i even_low = _mm512_shuffle_i32x4(x[b], x[b + 4], 0x88);
        const __m512i even_high = _mm512_shuffle_i32x4(x[b + 8], x[b + 12], 0x88);
        const __m512i odd_low = _mm512_shuffle_i32x4(x[b], x[b + 4], 0xDD);
        const __m512i odd_high = _mm512_shuffle_i32x4(x[b + 8], x[b + 12], 0xDD);
        y[b] = _mm512_shuffle_i32x4(even_low, even_high, 0x88);
        y[b + 8] = _mm512_shuffle_i32x4(even_low, even_high, 0xDD);
        y[b + 4] = _mm512_shuffle_i32x4(odd_low, odd_high, 0x88);
        y[b + 12] = _mm512_shuffle_i32x4(odd_low, odd_high, 0xDD);
    }
    for (int i = 0; i < 16; ++i) x[i] = y[i];
}

}  // namespace
