#include "self_check.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "ops/int_layout.h"
#include "thread_pool.h"

namespace octavo {

namespace {

constexpr int kRows = 35, kCols = 64, kGroups = kCols / kGroup;  // rows: tiles of 16 and what is left of them
constexpr int kPaddedRows = (kRows + kTileRows - 1) / kTileRows * kTileRows;

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
    return std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

// A product with pseudo-random operands of moderate size; the same ones every time.
struct Sample {
    explicit Sample(WeightKind kind)
        : weights(16 * 4 * kCols),
          floats(kRows * kCols),
          q(kRows * kCols + 64),
          tiles(kPaddedRows * kCols),
          out(kRows * kPanel) {
        uint32_t state = 12345;
        const auto next = [&state] { return state = state * 1664525u + 1013904223u, state >> 16; };
        const auto small = [&] { return static_cast<float>(static_cast<int>(next() % 255) - 127) / 64.0f; };
        for (uint8_t& byte : weights) byte = static_cast<uint8_t>(next());
        const bool is_float = kind == WeightKind::kF32 || kind == WeightKind::kF16 || kind == WeightKind::kBf16;
        const IntLayout layout = int_layout(kind);
        for (size_t i = 0; !is_float && i < (layout.two_level ? 1 : kGroups); ++i)
            for (size_t j = 0; j < (layout.has_minimum ? 4 : 2) * kPanel; j += 2)
                set_half(&weights[group_bytes(layout) * i + j]);
        if (kind == WeightKind::kF32)
            for (size_t i = 0; i < weights.size(); i += 4) set_float(&weights[i], small());
        if (kind == WeightKind::kF16 || kind == WeightKind::kBf16)
            for (size_t i = 0; i < weights.size(); i += 2) set_half(&weights[i]);
        for (float& x : floats) x = small();
        for (int8_t& x : q) x = static_cast<int8_t>(static_cast<int>(next() % 255) - 127);
        for (int i = 0; i < kRows * kGroups; ++i) {
            int32_t total = 0, low = 0;
            for (int k = 0; k < kGroup; ++k) {
                total += q[static_cast<size_t>(i * kGroup + k)];
                if (k < kGroup / 2) low = total;
            }
            lows.push_back(low);
            scale.push_back(0.01f + 0.001f * static_cast<float>(i % 7));
            totals.push_back(total);
            sum.push_back(scale.back() * static_cast<float>(total));
        }
        matrix = {kind, kPanel, kCols, 1, weights.size(), weights.data()};
        rounded = {q.data(), scale.data(), sum.data(), totals.data(), lows.data(), kCols, tiles.data(), kGroups};
        for (size_t row = 0; row < kRows; ++row)
            generic_kernels().round_bf16(&floats[row * kCols], kCols, rounded, row, 0);
    }

    static void set_float(uint8_t* at, float x) { std::memcpy(at, &x, 4); }
    // Keeps the random mantissa; exponent and sign of a small positive number in f16 and in bf16.
    static void set_half(uint8_t* at) { at[1] = static_cast<uint8_t>(0x20 | (at[1] & 0x0F)); }

    // Whether two kernels for this product, if there is one, agree.
    bool agree(const LinearByKind& one, const LinearByKind& other) {
        const auto kind = static_cast<size_t>(matrix.kind);
        if (!one[kind] || !other[kind]) return one[kind] == other[kind];
        const std::vector<float> wanted = run(one[kind]);
        return same_bits(wanted, run(other[kind]));
    }
    // Whether few rows give the same, one alone and more as columns.
    bool columns_agree(const Kernels& truth, const Kernels& kernels) {
        const Linear multiply = kernels.linear_bf16[static_cast<size_t>(matrix.kind)];
        if (!kernels.to_columns || !is_int4(matrix.kind)) return true;
        std::vector<uint16_t> columns(kMaxColumns * kCols);
        for (const int rows : {1, 7, 21, 35}) {
            const std::vector<float> wanted = run(truth.linear_bf16[static_cast<size_t>(matrix.kind)], rows);
            if (rows > 1) kernels.to_columns(rounded, rows, columns.data());
            if (!same_bits(wanted, run(multiply, rows, rows > 1 ? columns.data() : nullptr))) return false;
        }
        return true;
    }
    std::vector<float> run(Linear multiply, int rows = kRows, const uint16_t* columns = nullptr) {
        std::fill(out.begin(), out.end(), 0.0f);
        multiply({&matrix, {floats.data(), kCols}, rounded, 0, rows, 0, 1, out.data(), kPanel, columns});
        return out;
    }

    Matrix matrix;
    std::vector<uint8_t> weights;
    std::vector<float> floats;
    std::vector<int8_t> q;
    std::vector<float> scale, sum;
    std::vector<int32_t> totals, lows;
    std::vector<uint16_t> tiles;
    Quantised rounded;
    std::vector<float> out;
};

// Attention in bfloat16 over positions that not all rows see: two tiles of rows, two and one of dimensions.
class AttentionSample {
  public:
    AttentionSample() : q_(kQueries * kDim), k_(kPositions * kDim), v_(kPositions * kVDim) {
        uint32_t state = 12345;
        const auto next = [&state] { return state = state * 1664525u + 1013904223u, state >> 16; };
        const auto word = [&] { return static_cast<uint16_t>(0x3F00u | (next() & 0x807Fu)); };  // 0.5 to 1, any sign
        for (float& x : q_) x = static_cast<float>(static_cast<int>(next() % 255) - 127) / 64.0f;
        for (uint16_t& x : k_) x = word();
        for (size_t i = 0; i < v_.size(); ++i) v_[i] = i % kVDim < kDim ? word() : 0;
        for (int i = 0; i < kPositions; ++i) tile_.v[i] = &v_[static_cast<size_t>(i) * kVDim];
        for (int s = 0; s < kPositions / kKvLanes; ++s) tile_.k[s] = &k_[static_cast<size_t>(s) * kDim * kKvLanes];
    }

    // [rows][v_dim + 2]: acc, max, sum
    std::vector<float> run(const Kernels& kernels) const {
        std::vector<float> out(kQueries * (kVDim + 2));
        std::vector<AttentionRow> rows;
        for (int r = 0; r < kQueries; ++r) {
            float* acc = &out[static_cast<size_t>(r) * (kVDim + 2)];
            const float* q = &q_[static_cast<size_t>(r) * kDim];
            rows.push_back({q, r % 5, kPositions - kQueries + 1 + r, acc + kVDim, acc + kVDim + 1, acc});
        }
        kernels.attend_bf16(tile_, rows.data(), kQueries);
        return out;
    }

  private:
    static constexpr int kQueries = 19, kDim = 34, kVDim = 48, kPositions = 48;

    std::vector<float> q_;
    std::vector<uint16_t> k_, v_;
    AttentionTile tile_{{}, kKvLanes, {}, {}, kDim, kVDim, true, 0.2f, 0.0f};
};

}  // namespace

bool agrees_with_generic(const Kernels& kernels) {
    const FlushDenormals flush;
    const Kernels& truth = generic_kernels();
    for (int kind = 0; kind < static_cast<int>(WeightKind::kCount); ++kind) {
        Sample sample(static_cast<WeightKind>(kind));
        if (!sample.agree(truth.linear_float, kernels.linear_float) ||
            !sample.agree(truth.linear_int8, kernels.linear_int8) ||
            !sample.agree(truth.linear_bf16, kernels.linear_bf16) || !sample.columns_agree(truth, kernels))
            return false;
    }
    const AttentionSample attention;
    return same_bits(attention.run(truth), attention.run(kernels));
}

}  // namespace octavo
