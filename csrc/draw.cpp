#include "draw.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace octavo {

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kLargest = std::numeric_limits<float>::max();
constexpr float kVanished = -745.0f;  // exp of this and less is 0 even in float64: masked, or as good as
constexpr double kMinTemperature = 1e-5;
constexpr int kMaxDryMatch = 256;
constexpr double kMaxDryPenalty = 1e6;

uint64_t mix64(uint64_t x) {
    x += 0x9E3779B97F4A7C15u;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
}

int blocks_of(int n) { return (n + kSumBlock - 1) / kSumBlock; }

double total(const std::vector<Candidate>& candidates) {
    double sum = 0.0;
    for (const Candidate& c : candidates) sum += c.weight;
    return sum;
}

// Of the whole vocabulary.
double total(const DrawScratch& s, int n) {
    double sum = 0.0;
    for (int b = 0; b < blocks_of(n); ++b) sum += s.block_sums[static_cast<size_t>(b)];
    return sum;
}

void apply_masks(float* x, int n, const float* raw, const DrawParams& draw, const DrawLists& lists) {
    if (draw.has_allowed) {
        // `raw` still has the bias: it is the biased row kept aside
        std::fill(x, x + n, -kInfinity);
        for (const int32_t token : lists.allowed) x[token] = raw[token];
    }
    for (const int32_t token : lists.forbidden) x[token] = -kInfinity;
}

// Masks the tokens without a bit.
void apply_bits(float* x, int n, const uint32_t* bits) {
    for (int first = 0; first < n; first += 32) {
        const uint32_t word = bits[first / 32];
        if (word == ~uint32_t{0}) continue;
        for (int i = first; i < std::min(n, first + 32); ++i)
            if (!(word >> (i - first) & 1)) x[i] = -kInfinity;
    }
}

// Distinct tokens of `tokens`, each once, with its count left in scratch.counts; the caller must clear them.
template <class F>
void for_each_distinct(std::span<const int32_t> tokens, std::vector<int32_t>& counts, F&& f) {
    for (const int32_t token : tokens) ++counts[static_cast<size_t>(token)];
    for (const int32_t token : tokens) {
        int32_t& count = counts[static_cast<size_t>(token)];
        if (count) f(token, count);
        count = 0;
    }
}

void apply_penalties(float* x, const DrawParams& draw, const DrawLists& lists, DrawScratch& scratch) {
    if (draw.repetition_penalty != 1.0f)
        for_each_distinct(lists.history, scratch.counts, [&](int32_t token, int32_t) {
            if (x[token] == -kInfinity) return;
            const float scaled =
                x[token] > 0.0f ? x[token] / draw.repetition_penalty : x[token] * draw.repetition_penalty;
            x[token] = std::clamp(scaled, -kLargest, kLargest);
        });
    if (draw.frequency_penalty == 0.0f && draw.presence_penalty == 0.0f) return;
    const size_t prompt = std::min(static_cast<size_t>(draw.prompt_len), lists.history.size());
    for_each_distinct(lists.history.subspan(prompt), scratch.counts, [&](int32_t token, int32_t count) {
        x[token] = x[token] - draw.frequency_penalty * static_cast<float>(count) - draw.presence_penalty;
    });
}

// For each place of the last tokens, how many tokens before it equal the last ones: the Z-function of the reverse.
void apply_dry(float* x, const DrawParams& draw, const DrawLists& lists, DrawScratch& scratch) {
    std::span<const int32_t> seen = lists.history;
    if (draw.dry_multiplier == 0.0 || draw.dry_penalty_last_n == 0 || seen.size() < 2) return;
    if (draw.dry_penalty_last_n > 0 && static_cast<size_t>(draw.dry_penalty_last_n) < seen.size())
        seen = seen.last(static_cast<size_t>(draw.dry_penalty_last_n));
    const int n = static_cast<int>(seen.size());
    const auto reversed = [&](int i) { return seen[static_cast<size_t>(n - 1 - i)]; };
    int reach = 0;  // tokens from the end up to the first sequence breaker
    const auto breaks = [&](int32_t token) {
        return std::binary_search(lists.breakers.begin(), lists.breakers.end(), token);  // they are in ascending order
    };
    while (reach < n && !breaks(reversed(reach))) ++reach;
    std::vector<int32_t>& z = scratch.matches;
    z.assign(static_cast<size_t>(n), 0);
    for (int i = 1, left = 0, right = 0; i < n; ++i) {
        int length = i < right ? std::min(right - i, z[static_cast<size_t>(i - left)]) : 0;
        while (i + length < n && reversed(length) == reversed(i + length)) ++length;
        z[static_cast<size_t>(i)] = length;
        if (i + length > right) left = i, right = i + length;
    }
    // Position n - i followed the stretch that ends before it; counts keeps the longest per token.
    for (int i = 1; i < n; ++i) {
        int32_t& longest = scratch.counts[static_cast<size_t>(reversed(i - 1))];
        longest = std::max(longest, std::min(z[static_cast<size_t>(i)], reach));
    }
    for (int i = 1; i < n; ++i) {
        const int32_t token = reversed(i - 1);
        int32_t& longest = scratch.counts[static_cast<size_t>(token)];
        if (longest >= draw.dry_allowed_length) {
            const double power = std::pow(draw.dry_base, std::min(longest - draw.dry_allowed_length, kMaxDryMatch));
            x[token] -= static_cast<float>(std::min(draw.dry_multiplier * power, kMaxDryPenalty));
        }
        longest = 0;
    }
}

// Keeps the shortest head, in the order of `before`, whose weight reaches `wanted`: a quickselect by mass.
template <class Before>
void keep_mass(std::vector<Candidate>& c, double wanted, Before before) {
    double mass = 0.0;  // of [0, begin)
    auto begin = c.begin(), end = c.end();
    while (end - begin > 32) {
        auto middle = begin + (end - begin) / 2;
        std::nth_element(begin, middle, end, before);
        double left = mass;
        for (auto it = begin; it != middle; ++it) left += it->weight;
        if (left >= wanted) {
            end = middle;
        } else {
            mass = left;
            begin = middle;
        }
    }
    std::sort(begin, end, before);
    for (auto it = begin; it != end; ++it) {
        mass += it->weight;
        if (mass >= wanted) {
            c.erase(it + 1, c.end());
            return;
        }
    }
    // reached only at the border of a half, or by rounding at the very end
    if (end != c.end()) c.erase(end, c.end());
}

// Weights relative to the likeliest candidate left, as every stage starts from: they may all have vanished beside a
// token that a stage removed.
void renormalise(std::vector<Candidate>& c) {
    float top = -kInfinity;
    for (const Candidate& x : c) top = std::max(top, x.z);
    if (top == 0.0f || top == -kInfinity) return;
    for (Candidate& x : c) {
        x.z -= top;
        x.weight = static_cast<float>(std::exp(static_cast<double>(x.z)));
    }
}

void keep_typical(std::vector<Candidate>& c, double share) {
    const double sum = total(c), log_sum = std::log(sum);
    double entropy = 0.0;
    for (const Candidate& x : c)
        if (x.weight > 0.0f) entropy -= x.weight / sum * (static_cast<double>(x.z) - log_sum);
    const auto distance = [&](const Candidate& x) { return std::abs(static_cast<double>(x.z) - log_sum + entropy); };
    keep_mass(c, share * sum, [&](const Candidate& a, const Candidate& b) {
        const double da = distance(a), db = distance(b);
        return da != db ? da < db : a.id < b.id;
    });
    renormalise(c);
}

void keep_min_p(std::vector<Candidate>& c, double min_p) {
    std::erase_if(c, [&](const Candidate& x) { return x.weight < min_p; });
}

// Removes every candidate of probability >= threshold but the least likely one (of equals the highest id).
void exclude_top_choices(std::vector<Candidate>& c, double threshold) {
    const double limit = threshold * total(c);
    const auto above = [&](const Candidate& x) { return x.weight >= limit && x.z > kVanished; };
    const Candidate* stays = nullptr;
    for (const Candidate& x : c)
        if (above(x) && (!stays || likelier(*stays, x))) stays = &x;
    if (!stays) return;
    const int32_t id = stays->id;
    std::erase_if(c, [&](const Candidate& x) { return above(x) && x.id != id; });
    renormalise(c);
}

int32_t invert(std::vector<Candidate>& c, double u) {
    std::sort(c.begin(), c.end(), [](const Candidate& a, const Candidate& b) { return a.id < b.id; });
    const double wanted = u * total(c);
    double cumulative = 0.0;
    int32_t last = -1;
    for (const Candidate& x : c) {
        if (x.weight > 0.0f) last = x.id;
        cumulative += x.weight;
        if (cumulative > wanted) return x.id;
    }
    return last;
}

// The same over the whole vocabulary: first the block, then the token in it.
int32_t invert_all(const DrawScratch& s, int n, double u) {
    const double wanted = u * total(s, n);
    double before = 0.0;
    int block = 0;
    for (; block + 1 < blocks_of(n); ++block) {
        const double next = before + s.block_sums[static_cast<size_t>(block)];
        if (next > wanted) break;
        before = next;
    }
    int32_t last = -1;
    for (int i = block * kSumBlock; i < n; ++i) {  // rounding may carry it past the block: the next weight is the one
        const float w = s.weights[static_cast<size_t>(i)];
        if (w > 0.0f) last = i;
        before += w;
        if (w > 0.0f && before > wanted) return i;
    }
    return last;
}

// Tokens whose weight is at least `limit`.
void gather_above(const DrawScratch& s, int n, float limit, std::vector<Candidate>& out) {
    out.clear();
    for (int b = 0; b < blocks_of(n); ++b) {
        if (s.block_sums[static_cast<size_t>(b)] < limit) continue;
        for (int i = b * kSumBlock; i < std::min(n, (b + 1) * kSumBlock); ++i)
            if (s.weights[static_cast<size_t>(i)] >= limit)
                out.push_back({i, s.z[static_cast<size_t>(i)], s.weights[static_cast<size_t>(i)]});
    }
}

// Likeliest tokens that hold at least `wanted` weight, and perhaps more: a head that top-p then cuts exactly.
void gather_mass(const DrawScratch& s, int n, double wanted, std::vector<Candidate>& out) {
    for (float limit = 1e-2f; limit > 1e-7f; limit *= 0.1f) {
        gather_above(s, n, limit, out);
        if (total(out) >= wanted * (1.0 + 1e-6)) return;
    }
    gather_above(s, n, 0.0f, out);
}

}  // namespace

DrawScratch::DrawScratch(int vocab_size) {
    const auto n = static_cast<size_t>(vocab_size);
    for (auto* rows : {&adjusted, &z, &weights}) rows->resize(n + kSumBlock);
    block_sums.resize(n / kSumBlock + 1);
    block_max.resize(n / kSumBlock + 1);
    counts.resize(n);
}

double uniform(uint64_t stream, int64_t position, uint64_t purpose) {
    const uint64_t bits = mix64(mix64(stream ^ mix64(static_cast<uint64_t>(position))) + purpose);
    return static_cast<double>(bits >> 11) * 0x1p-53;
}

const float* adjust(const float* logits, int n, const DrawParams& draw, const DrawLists& lists, const uint32_t* mask,
                    DrawScratch& scratch) {
    const bool penalised =
        !lists.history.empty() && (draw.repetition_penalty != 1.0f || draw.presence_penalty != 0.0f ||
                                   draw.frequency_penalty != 0.0f || draw.dry_multiplier > 0.0);
    if (lists.bias_ids.empty() && lists.forbidden.empty() && !draw.has_allowed && !penalised && !mask) return logits;
    float* x = scratch.adjusted.data();
    std::copy(logits, logits + n, x);
    for (size_t i = 0; i < lists.bias_ids.size(); ++i) x[lists.bias_ids[i]] += lists.bias_values[i];
    if (draw.has_allowed) {
        float* biased = scratch.z.data();
        std::copy(x, x + n, biased);
        apply_masks(x, n, biased, draw, lists);
    } else {
        apply_masks(x, n, nullptr, draw, lists);
    }
    if (mask) apply_bits(x, n, mask);
    apply_penalties(x, draw, lists, scratch);
    apply_dry(x, draw, lists, scratch);
    return x;
}

void select_top(const Kernels& kernels, const float* x, int n, int k, DrawScratch& scratch,
                std::vector<Candidate>& out) {
    out.clear();
    if (k <= 0) return;
    std::vector<float>& top = scratch.block_max;
    kernels.block_max(x, n, top.data());
    const int blocks = blocks_of(n);
    float limit = -kInfinity;
    if (k <= blocks) {
        // k blocks reach the k-th largest block maximum, so at least k values do
        std::vector<float>& order = scratch.order;
        order.assign(top.begin(), top.begin() + blocks);
        std::nth_element(order.begin(), order.begin() + (k - 1), order.end(), std::greater<float>());
        limit = order[static_cast<size_t>(k - 1)];
    }
    for (int b = 0; b < blocks; ++b) {
        if (top[static_cast<size_t>(b)] < limit) continue;
        for (int i = b * kSumBlock; i < std::min(n, (b + 1) * kSumBlock); ++i)
            if (x[i] >= limit) out.push_back({i, x[i], 0.0f});
    }
    const auto kept = static_cast<size_t>(std::min(k, n));
    if (out.size() > kept) {
        std::nth_element(out.begin(), out.begin() + static_cast<std::ptrdiff_t>(kept), out.end(), likelier);
        out.resize(kept);
    }
    std::sort(out.begin(), out.end(), likelier);
}

double log_sum_exp(const Kernels& kernels, const float* x, int n, float shift, DrawScratch& scratch) {
    kernels.softmax_terms(x, n, shift, 1.0f, scratch.z.data(), scratch.weights.data(), scratch.block_sums.data());
    return std::log(total(scratch, n));
}

int32_t choose(const Kernels& kernels, const float* x, int n, int best, float largest, const DrawParams& draw,
               int64_t position, DrawScratch& scratch) {
    if (largest == -kInfinity) return kNoTokenLeft;
    if (draw.temperature == 0.0f) return best;
    DrawScratch& s = scratch;
    const float temperature = std::max(draw.temperature, static_cast<float>(kMinTemperature));
    kernels.softmax_terms(x, n, largest, temperature, s.z.data(), s.weights.data(), s.block_sums.data());
    const bool exclude = uniform(draw.stream, position, 1) < draw.xtc_probability;
    const double u = uniform(draw.stream, position, 0);
    std::vector<Candidate>& c = s.candidates;
    bool cut = false;  // by top-p already
    if (draw.top_k > 0 && draw.top_k < n) {
        select_top(kernels, s.z.data(), n, draw.top_k, s, c);
        for (Candidate& x : c) x.weight = s.weights[static_cast<size_t>(x.id)];
    } else if (draw.typical_p < 1.0 || exclude) {
        gather_above(s, n, 0.0f, c);
    } else if (draw.top_p < 1.0) {
        gather_mass(s, n, draw.top_p * total(s, n), c);
        keep_mass(c, draw.top_p * total(s, n), likelier);
        cut = true;
    } else if (draw.min_p > 0.0) {
        gather_above(s, n, static_cast<float>(draw.min_p) * (1.0f - 1e-6f), c);
    } else {
        return invert_all(s, n, u);
    }
    if (draw.typical_p < 1.0) keep_typical(c, draw.typical_p);
    if (draw.top_p < 1.0 && !cut) keep_mass(c, draw.top_p * total(c), likelier);
    if (draw.min_p > 0.0) keep_min_p(c, draw.min_p);
    if (exclude) exclude_top_choices(c, draw.xtc_threshold);
    return invert(c, u);
}

}  // namespace octavo
