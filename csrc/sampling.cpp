#include "sampling.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "draw.h"

namespace octavo {

namespace {

void check_ids(const char* name, std::span<const int32_t> ids, int vocab_size) {
    for (const int32_t id : ids)
        if (id < 0 || id >= vocab_size)
            throw std::invalid_argument(std::string(name) + " has token id " + std::to_string(id) +
                                        " but the vocabulary has " + std::to_string(vocab_size) + " tokens");
}

// The next `count` entries of a ragged list.
template <class T>
std::span<const T> take(std::span<const T>& rest, int32_t count) {
    if (count < 0 || static_cast<size_t>(count) > rest.size())
        throw std::invalid_argument("a draw's lists are shorter than its counts say");
    const auto head = rest.first(static_cast<size_t>(count));
    rest = rest.subspan(static_cast<size_t>(count));
    return head;
}

size_t words_of(int vocab_size) { return (static_cast<size_t>(vocab_size) + 31) / 32; }

void check_masks(const DrawMasks& masks, size_t num_draws, int vocab_size) {
    if (masks.rows.empty()) return;
    const auto count = static_cast<int64_t>(masks.bits.size() / words_of(vocab_size));
    const auto is_row = [&](int32_t row) { return row >= -1 && row < count; };
    if (!masks.filled || masks.rows.size() != num_draws || !std::all_of(masks.rows.begin(), masks.rows.end(), is_row))
        throw std::invalid_argument("masks are not of the draws, or fewer than the draws ask for");
}

}  // namespace

Sampler::Sampler(const Kernels& kernels, int vocab_size, int threads)
    : kernels_(kernels), vocab_size_(vocab_size), scratch_(static_cast<size_t>(threads)) {}

Sampler::~Sampler() = default;

void Sampler::begin(const Step& step, std::span<const DrawParams> draws, const DrawLists& lists,
                    std::span<const Target> targets, const DrawMasks& masks) {
    check_ids("logit_bias", lists.bias_ids, vocab_size_);
    check_ids("allowed_token_ids", lists.allowed, vocab_size_);
    check_ids("the forbidden tokens", lists.forbidden, vocab_size_);
    check_ids("the history", lists.history, vocab_size_);
    for (const Target& target : targets) check_ids("targets", {&target.token, 1}, vocab_size_);
    check_masks(masks, draws.size(), vocab_size_);
    logit_rows_ = step.logit_rows;
    positions_ = step.positions;
    draws_ = draws;
    targets_ = targets;
    masks_ = masks;
    per_draw_.clear();
    DrawLists rest = lists;
    for (const DrawParams& d : draws) {
        DrawLists own;
        own.bias_ids = take(rest.bias_ids, d.num_bias);
        own.bias_values = take(rest.bias_values, d.num_bias);
        own.allowed = take(rest.allowed, d.num_allowed);
        own.forbidden = take(rest.forbidden, d.num_forbidden);
        const auto with_next = rest.history;
        own.history = take(rest.history, d.num_history);
        if (d.goes_on) rest.history = with_next;
        own.breakers = take(rest.breakers, d.num_breakers);
        per_draw_.push_back(own);
    }
    results_.assign(draws.size() + targets.size(), RowResult{});
}

size_t Sampler::scratch_bytes() const {
    constexpr size_t per_token = 3 * sizeof(float) + sizeof(int32_t) + sizeof(Candidate);
    return scratch_.size() * static_cast<size_t>(vocab_size_) * per_token;
}

void Sampler::consume(const float* logits, int row, int thread) {
    std::unique_ptr<DrawScratch>& scratch = scratch_[static_cast<size_t>(thread)];
    if (!scratch) scratch = std::make_unique<DrawScratch>(vocab_size_);
    draw(logits, row, *scratch);
}

const uint32_t* Sampler::mask(size_t draw) const {
    if (masks_.rows.empty() || masks_.rows[draw] < 0) return nullptr;
    masks_.filled->wait();
    return masks_.bits.data() + static_cast<size_t>(masks_.rows[draw]) * words_of(vocab_size_);
}

void Sampler::draw(const float* logits, int row, DrawScratch& scratch) {
    const auto r = static_cast<size_t>(row);
    RowResult& result = results_[r];
    float raw_largest;
    bool finite;
    int best = kernels_.argmax(logits, vocab_size_, &raw_largest, &finite);
    if (!finite) return;
    if (r >= draws_.size()) {
        const Target& target = targets_[r - draws_.size()];
        result.token = target.token;
        report(logits, raw_largest, target.token, target.num_alternatives, scratch, result);
        return;
    }
    const DrawParams& draw = draws_[r];
    const float* x = adjust(logits, vocab_size_, draw, per_draw_[r], mask(r), scratch);
    float largest = raw_largest;
    bool unused;
    if (x != logits) best = kernels_.argmax(x, vocab_size_, &largest, &unused);
    const int64_t position = int64_t{positions_[static_cast<size_t>(logit_rows_[r])]} + 1;
    result.token = choose(kernels_, x, vocab_size_, best, largest, draw, position, scratch);
    if (result.token >= 0 && draw.num_logprobs >= 0)
        report(logits, raw_largest, result.token, draw.num_logprobs, scratch, result);
}

void Sampler::report(const float* logits, float largest, int32_t token, int num_alternatives, DrawScratch& scratch,
                     RowResult& result) const {
    const double log_sum = log_sum_exp(kernels_, logits, vocab_size_, largest, scratch);
    const auto logprob = [&](float x) { return static_cast<double>(x) - static_cast<double>(largest) - log_sum; };
    result.has_logprob = true;
    result.logprob = logprob(logits[token]);
    select_top(kernels_, logits, vocab_size_, num_alternatives, scratch, scratch.candidates);
    result.top.clear();
    for (const Candidate& c : scratch.candidates) result.top.emplace_back(c.id, logprob(c.z));
}

}  // namespace octavo
