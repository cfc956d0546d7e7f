#include "step.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace octavo {

namespace {

constexpr size_t kMaxGroups = 1024;  // so that sizes cannot overflow

void require(bool ok, const char* what, int64_t value, const char* wanted, int64_t limit) {
    if (!ok)
        throw std::invalid_argument(std::string(what) + " is " + std::to_string(value) + " but must be " + wanted +
                                    " " + std::to_string(limit));
}

// Every value in [low, high).
void check_range(const char* name, std::span<const int32_t> values, int64_t low, int64_t high) {
    for (const int32_t value : values)
        if (value < low || value >= high)
            throw std::invalid_argument(std::string(name) + " has " + std::to_string(value) + " but takes [" +
                                        std::to_string(low) + ", " + std::to_string(high) + ")");
}

void check_sequence(const Step& step, int s, const KvCache& kv) {
    const int block_size = kv.shape().block_size;
    const int begin = step.query_starts[s], end = step.query_starts[s + 1], context = step.context_lens[s];
    require(end > begin, "a query_starts entry", end, "above", begin);
    require(end <= step.num_tokens(), "a query_starts entry", end, "at most", step.num_tokens());
    require(context >= end - begin, "a context_lens entry", context, "at least its queries,", end - begin);
    const int64_t room = static_cast<int64_t>(step.table_width) * block_size;
    require(context <= room, "a context_lens entry", context, "at most what its block table covers,", room);
    for (int t = begin; t < end; ++t)
        require(step.positions[t] == context - end + t, "a position", step.positions[t], "the query's,",
                context - end + t);
    for (int g = 0; g < kv.num_groups(); ++g) {
        const KvGroup& group = kv.group(g);
        // what no query sees is never read, whatever its entry says
        const int first = group.window ? std::max(0, step.positions[begin] - group.window + 1) / block_size : 0;
        const int last = (context + block_size - 1) / block_size;
        check_range("block_tables", std::span(step.table(g, s), step.table(g, s) + last).subspan(first), 0,
                    group.num_blocks);
    }
}

}  // namespace

Step::Step(std::span<const int32_t> ints, size_t num_tokens, size_t num_rows, size_t num_seqs, size_t num_copies,
           size_t num_groups) {
    const size_t size = ints.size();
    // each is at most the whole, so that the sum below cannot overflow
    const bool possible = num_seqs >= 1 && num_groups >= 1 && num_groups <= kMaxGroups &&
                          std::max({num_tokens, num_rows, num_seqs, num_copies}) <= size;
    const size_t fixed = possible ? (2 + num_groups) * num_tokens + 4 * num_copies + num_rows + 2 * num_seqs + 1 : 0;
    if (!possible || fixed > size || (size - fixed) % (num_groups * num_seqs))
        throw std::invalid_argument("a step of " + std::to_string(num_tokens) + " tokens, " + std::to_string(num_rows) +
                                    " rows, " + std::to_string(num_seqs) + " sequences and " +
                                    std::to_string(num_copies) + " copies in " + std::to_string(num_groups) +
                                    " groups cannot have " + std::to_string(size) + " ints");
    const auto take = [&ints](size_t count) {
        const auto part = ints.first(count);
        ints = ints.subspan(count);
        return part;
    };
    token_ids = take(num_tokens);
    positions = take(num_tokens);
    slot_mapping = take(num_groups * num_tokens);
    logit_rows = take(num_rows);
    query_starts = take(num_seqs + 1);
    context_lens = take(num_seqs);
    copies = take(4 * num_copies);
    block_tables = ints;
    table_width = static_cast<int>(ints.size() / (num_groups * num_seqs));
}

void check_step(const Step& step, const StepLimits& limits, const KvCache& kv) {
    const size_t tokens = step.token_ids.size(), seqs = step.context_lens.size();
    require(tokens >= 1 && tokens <= static_cast<size_t>(limits.max_tokens), "the number of token_ids",
            static_cast<int64_t>(tokens), "from 1 to", limits.max_tokens);
    require(seqs >= 1 && seqs <= static_cast<size_t>(limits.max_seqs), "the number of context_lens",
            static_cast<int64_t>(seqs), "from 1 to", limits.max_seqs);
    require(step.logit_rows.size() <= tokens, "the number of logit_rows", static_cast<int64_t>(step.logit_rows.size()),
            "at most", static_cast<int64_t>(tokens));
    check_range("token_ids", step.token_ids, 0, limits.vocab_size);
    check_range("logit_rows", step.logit_rows, 0, static_cast<int64_t>(tokens));
    const int block_size = kv.shape().block_size;
    require(step.slot_mapping.size() == tokens * static_cast<size_t>(kv.num_groups()), "the number of slots",
            static_cast<int64_t>(step.slot_mapping.size()), "one for each token and group,",
            static_cast<int64_t>(tokens) * kv.num_groups());
    for (int g = 0; g < kv.num_groups(); ++g)
        check_range("slot_mapping", step.slot_mapping.subspan(static_cast<size_t>(g) * tokens, tokens), -1,
                    static_cast<int64_t>(kv.group(g).num_blocks) * block_size);
    require(step.query_starts[0] == 0, "query_starts[0]", step.query_starts[0], "exactly", 0);
    for (size_t s = 0; s < seqs; ++s) check_sequence(step, static_cast<int>(s), kv);
    require(step.query_starts[seqs] == step.num_tokens(), "the last of query_starts", step.query_starts[seqs],
            "the number of tokens,", step.num_tokens());
    for (size_t i = 0; i < step.copies.size(); i += 4) {
        check_range("copies", step.copies.subspan(i, 1), 0, kv.num_groups());
        check_range("copies", step.copies.subspan(i + 1, 2), 0, kv.group(step.copies[i]).num_blocks);
        require(step.copies[i + 3] >= 0 && step.copies[i + 3] <= block_size, "a copy's number of tokens",
                step.copies[i + 3], "from 0 to", block_size);
    }
}

}  // namespace octavo
