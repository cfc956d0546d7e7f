// Draws, by the rules written out in src/octavo/kernels/reference/sampling.py, without sorting the vocabulary.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "ops/types.h"
#include "program.h"

namespace octavo {

// The fixed part of a draw. Mirrored by DRAW_DTYPE in kernels/native/draws.py, whose offsets a test compares.
struct DrawParams {
    uint64_t stream;
    double typical_p, top_p, min_p, xtc_probability, xtc_threshold;
    double dry_multiplier, dry_base;
    float temperature, repetition_penalty, presence_penalty, frequency_penalty;
    int32_t top_k;
    int32_t dry_allowed_length, dry_penalty_last_n;
    int32_t num_logprobs;  // -1: none wanted
    int32_t prompt_len;
    int32_t has_allowed;  // 0: all tokens are allowed
    // Lengths of this draw's parts of the lists below.
    int32_t num_bias, num_allowed, num_forbidden, num_history, num_breakers;
    int32_t goes_on;  // the next draw has the same history, this long or longer, which stands in the list with the last
};
static_assert(sizeof(DrawParams) == 128);

// Ragged lists, one after the other in the order of the draws.
struct DrawLists {
    std::span<const int32_t> bias_ids;
    std::span<const float> bias_values;
    std::span<const int32_t> allowed, forbidden, history, breakers;  // breakers in ascending order
};

// Opened by another thread when it has written what this one reads.
class Latch {
  public:
    void open() {
        open_.store(1, std::memory_order_release);
        open_.notify_all();
    }
    void wait() const { open_.wait(0, std::memory_order_acquire); }

  private:
    std::atomic<uint32_t> open_{0};
};

// Tokens that some draws may take, written while the forward pass runs: the draws wait for `filled`.
struct DrawMasks {
    std::span<const int32_t> rows;   // per draw, its row of bits; -1: it has none
    std::span<const uint32_t> bits;  // [rows, ceil(vocab / 32)]; bit t % 32 of word t / 32: token t may be drawn
    const Latch* filled = nullptr;
};

struct Target {
    int32_t token, num_alternatives;
};

// In place of a token: why there is none. Mirrored by _FAILURES in kernels/native/backend.py.
constexpr int32_t kNotFinite = -1, kNoTokenLeft = -2;

// What came of one logit row.
struct RowResult {
    int32_t token = kNotFinite;
    bool has_logprob = false;
    double logprob = 0.0;
    std::vector<std::pair<int32_t, double>> top;
};

// Draws the first rows of logits, reports on the rest, rows in parallel.
class Sampler final : public LogitsConsumer {
  public:
    Sampler(const Kernels& kernels, int vocab_size, int threads);
    ~Sampler();
    Sampler(const Sampler&) = delete;
    Sampler& operator=(const Sampler&) = delete;

    // For the next step; the arrays must stay alive until it is done. A row's draw is of the position after the row's.
    // Throws std::invalid_argument if a list is too short or a token id is outside the vocabulary.
    void begin(const Step& step, std::span<const DrawParams> draws, const DrawLists& lists,
               std::span<const Target> targets, const DrawMasks& masks);
    void consume(const float* logits, int row, int thread) override;
    // What the threads' scratch may grow to, but for histories: three rows, counts and candidates each.
    size_t scratch_bytes() const;
    const std::vector<RowResult>& results() const { return results_; }

  private:
    // The words of a draw's mask, once they are written; null if it has none.
    const uint32_t* mask(size_t draw) const;
    void draw(const float* logits, int row, struct DrawScratch& scratch);
    void report(const float* logits, float largest, int32_t token, int num_alternatives, struct DrawScratch& scratch,
                RowResult& result) const;

    const Kernels& kernels_;
    const int vocab_size_;
    std::vector<std::unique_ptr<struct DrawScratch>> scratch_;  // made by the thread that uses it
    std::span<const int32_t> logit_rows_, positions_;
    std::span<const DrawParams> draws_;
    DrawLists lists_;
    std::span<const Target> targets_;
    DrawMasks masks_;
    std::vector<DrawLists> per_draw_;
    std::vector<RowResult> results_;
};

}  // namespace octavo
