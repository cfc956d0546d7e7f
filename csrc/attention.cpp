#include "attention.h"

#include <algorithm>
#include <cstring>

namespace octavo {

namespace {

constexpr int kItemRows = 96;       // rows that reuse a tile of K and V from L2
constexpr int kItemRowsBf16 = 384;  // the more rows, the rarer K and V are brought into tiles
constexpr int kBlockQueries = 32;   // with bf16, items are multiples of this, so of whole blocks of 32 rows
constexpr int kRowsToWiden = 24;    // from so many on, converting K and V to float32 once is cheaper than every time
constexpr int kItemsPerThread = 4;  // fewer, and the last item leaves the other threads waiting

// V rows of positions [begin, end) of an item's sequence, through the block table.
void locate_values(const Step& step, const KvCache& kv, const AttentionItem& item, int layer, int begin, int end,
                   const void** v) {
    const KvShape& s = kv.shape();
    const int32_t* table = step.table(kv.group_of(layer), item.seq);
    const size_t row = static_cast<size_t>(s.v_dim()) * s.element_bytes();
    const size_t before = (static_cast<size_t>(item.kv_head) * s.head_elements() + s.k_elements()) * s.element_bytes();
    for (int position = begin; position < end;) {
        const int offset = position % s.block_size, run = std::min(s.block_size - offset, end - position);
        const uint8_t* first = kv.layer(table[position / s.block_size], layer) + before + offset * row;
        for (int i = 0; i < run; ++i) *v++ = first + i * row;
        position += run;
    }
}

// Pointers to one tile's K vectors and V rows through the block table; only positions [begin, end) are set.
void locate_tile(const Step& step, const KvCache& kv, const AttentionItem& item, int layer, int base, int begin,
                 int end, const AttentionScratch& scratch, AttentionTile& tile) {
    const KvShape& s = kv.shape();
    const size_t bytes = s.element_bytes();
    const int32_t* table = step.table(kv.group_of(layer), item.seq);
    const size_t head = static_cast<size_t>(item.kv_head) * s.head_elements();
    const bool direct = s.block_size % kKvLanes == 0;
    tile.k_stride = direct ? static_cast<size_t>(s.block_size) : kKvLanes;
    locate_values(step, kv, item, layer, base + begin, base + end, tile.v + begin);
    for (int t = begin; t < end;) {
        const int position = base + t, offset = position % s.block_size;
        const int run = std::min(s.block_size - offset, end - t);
        const uint8_t* start = kv.layer(table[position / s.block_size], layer) + head * bytes;
        if (direct) {
            for (int i = (kKvLanes - offset % kKvLanes) % kKvLanes; i < run; i += kKvLanes)
                tile.k[(t + i) / kKvLanes] = start + static_cast<size_t>(offset + i) * bytes;
            if (offset % kKvLanes)
                tile.k[t / kKvLanes] = start + static_cast<size_t>(offset / kKvLanes * kKvLanes) * bytes;
        } else {
            for (int i = 0; i < run; ++i) {
                uint8_t* to =
                    scratch.gathered +
                    (static_cast<size_t>((t + i) / kKvLanes) * s.head_dim * kKvLanes + (t + i) % kKvLanes) * bytes;
                const uint8_t* from = start + static_cast<size_t>(offset + i) * bytes;
                for (int d = 0; d < s.head_dim; ++d)
                    std::memcpy(to + static_cast<size_t>(d) * kKvLanes * bytes,
                                from + static_cast<size_t>(d) * s.block_size * bytes, bytes);
                tile.k[(t + i) / kKvLanes] =
                    scratch.gathered + static_cast<size_t>((t + i) / kKvLanes) * s.head_dim * kKvLanes * bytes;
            }
        }
        t += run;
    }
}

// The (query, head) rows of one item, in the order of their positions.
struct ItemRows {
    ItemRows(const AttentionContext& c, int index)
        : context(c),
          item(c.plan.items[static_cast<size_t>(index)]),
          group(c.plan.group),
          head_dim(c.kv.shape().head_dim),
          v_dim(c.kv.shape().v_dim()),
          count((item.query_end - item.query_begin) * group) {}

    int position(int row) const { return context.step.positions[static_cast<size_t>(item.query_begin + row / group)]; }
    // First position that the row sees.
    int lowest(int row) const {
        return context.call.window > 0 ? std::max(0, position(row) - context.call.window + 1) : 0;
    }
    // The tile, as its first position, that holds the first position that the row sees.
    int first_tile(int row) const { return lowest(row) / kKvTile * kKvTile; }
    size_t offset(int row, size_t stride) const {
        const auto head = static_cast<size_t>(item.kv_head * group + row % group);
        return static_cast<size_t>(item.query_begin + row / group) * stride + head * static_cast<size_t>(head_dim);
    }
    // Row `row` with its result in `results`, [rows][v_dim + 2]: acc, max, sum.
    AttentionRow at(float* results, int row, int begin = 0, int end = 0) const {
        float* acc = results + static_cast<size_t>(row) * static_cast<size_t>(v_dim + 2);
        return {
            context.call.q.data + offset(row, context.call.q.stride), begin, end, acc + v_dim, acc + v_dim + 1, acc};
    }
    void finish(float* results) const {
        const AttentionCall& call = context.call;
        for (int row = 0; row < count; ++row)
            context.kernels.attention_finish(at(results, row), head_dim, call.out.data + offset(row, call.out.stride));
        const int columns = group * head_dim;  // of this KV head: whole groups of 32, if they are to be rounded
        for (int row = 0; row < count; row += group)
            round_row(context.kernels, call.out.data + offset(row, call.out.stride), columns, call.quantised,
                      static_cast<size_t>(item.query_begin + row / group), static_cast<size_t>(item.kv_head * columns));
    }

    const AttentionContext& context;
    const AttentionItem& item;
    const int group, head_dim, v_dim, count;
};

// The tile that starts at `base`, for the rows that see it: into `first` if it is a row's first tile, else `later`.
// Then the thread goes on to `next`, at the position that is `next_begin`.
void attend_tile(const ItemRows& rows, int base, const AttentionScratch& scratch, float* first, float* later,
                 const ItemRows* next = nullptr, int next_begin = 0) {
    const AttentionContext& c = rows.context;
    AttentionTile tile;
    std::fill_n(tile.next_v, kKvNext, nullptr);
    if (next) {
        const int next_end = std::min(next_begin + kKvNext, next->position(next->count - 1) + 1);
        locate_values(c.step, c.kv, next->item, c.call.layer, next_begin, next_end, tile.next_v);
    }
    tile.head_dim = rows.head_dim;
    tile.v_dim = rows.v_dim;
    tile.kv_bf16 = c.kv.shape().bf16();
    tile.scale = c.call.scale;
    tile.soft_cap = c.call.soft_cap;
    const int tile_begin = std::max(0, rows.lowest(0) - base);
    const int tile_end = std::min(kKvTile, rows.position(rows.count - 1) + 1 - base);
    locate_tile(c.step, c.kv, rows.item, c.call.layer, base, tile_begin, tile_end, scratch, tile);
    int count = 0;
    for (int row = 0; row < rows.count; ++row) {
        const int begin = std::max(0, rows.lowest(row) - base);
        const int end = std::min(kKvTile, rows.position(row) + 1 - base);
        if (begin < end) scratch.rows[count++] = rows.at(rows.first_tile(row) == base ? first : later, row, begin, end);
    }
    if (c.plan.bf16) return c.kernels.attend_bf16(tile, scratch.rows, count);
    if (tile.kv_bf16 && count >= kRowsToWiden)
        c.kernels.widen(tile, tile_begin, tile_end, scratch.wide_k, scratch.wide_v);
    c.kernels.attend(tile, scratch.rows, count);
}

// With bf16, items are as large as leaves several to each thread. Results do not depend on it.
int item_queries(const Step& step, int group, int num_kv_heads, int threads, bool bf16) {
    const int most = attention_item_rows(group, bf16) / group;
    if (!bf16) return most;
    const int share = step.num_tokens() * num_kv_heads / (kItemsPerThread * threads);
    return std::clamp(share / kBlockQueries * kBlockQueries, std::min(kBlockQueries, most), most);
}

}  // namespace

int attention_item_rows(int group, bool bf16) {
    const int queries = std::max((bf16 ? kItemRowsBf16 : kItemRows) / group, 1);
    return (bf16 && queries > kBlockQueries ? queries / kBlockQueries * kBlockQueries : queries) * group;
}

AttentionPlan plan_attention(const Step& step, int group, int num_kv_heads, int threads, bool bf16) {
    AttentionPlan plan{group, bf16, {}, {}, {}};
    const int queries = item_queries(step, group, num_kv_heads, threads, bf16);
    struct Priced {
        int64_t cost;
        AttentionItem item;
    };
    std::vector<Priced> priced;
    for (int s = 0; s < step.num_seqs(); ++s) {
        const int begin = step.query_starts[s], end = step.query_starts[s + 1];
        for (int q = begin; q < end; q += queries) {
            const int last = std::min(end, q + queries);
            const int64_t cost = static_cast<int64_t>(last - q) * step.positions[last - 1];
            for (int h = 0; h < num_kv_heads; ++h) priced.push_back({cost, {s, h, q, last}});
        }
    }
    std::stable_sort(priced.begin(), priced.end(), [](const Priced& a, const Priced& b) { return a.cost > b.cost; });
    for (const Priced& p : priced) plan.items.push_back(p.item);
    const bool few = threads > 1 && plan.items.size() < static_cast<size_t>(kItemsPerThread * threads);
    if (!few || step.num_tokens() != step.num_seqs()) return plan;  // also if any sequence runs several queries
    int partials = 0;
    for (size_t i = 0; i < plan.items.size(); ++i) {
        plan.first_partial.push_back(partials);
        const int position = step.positions[static_cast<size_t>(plan.items[i].query_begin)];
        for (int tile = 0; tile * kKvTile <= position; ++tile)
            plan.parts.push_back({static_cast<int>(i), tile, partials++});
    }
    plan.first_partial.push_back(partials);
    if (plan.parts.size() == plan.items.size()) plan.parts.clear();  // one tile each: nothing to split
    return plan;
}

AttentionScratch::AttentionScratch(uint8_t* memory, int group, int head_dim, bool bf16) {
    const auto num_rows = static_cast<size_t>(attention_item_rows(group, bf16));
    const size_t row_floats = static_cast<size_t>((head_dim + 15) / 16 * 16) + 2;
    rows = reinterpret_cast<AttentionRow*>(memory);
    running = reinterpret_cast<float*>(rows + num_rows);
    latest = running + num_rows * row_floats;
    gathered = reinterpret_cast<uint8_t*>(latest + num_rows * row_floats);
    float* widened = reinterpret_cast<float*>(gathered) + static_cast<size_t>(kKvTile) * static_cast<size_t>(head_dim);
    wide_k = bf16 ? nullptr : widened;
    wide_v = bf16 ? nullptr : widened + static_cast<size_t>(kKvTile) * static_cast<size_t>(head_dim);
}

size_t AttentionScratch::bytes(int group, int head_dim, bool bf16) {
    const auto num_rows = static_cast<size_t>(attention_item_rows(group, bf16)), dim = static_cast<size_t>(head_dim);
    const size_t v_dim = (dim + 15) / 16 * 16;
    const size_t tile_floats = static_cast<size_t>(kKvTile) * (bf16 ? dim : 2 * dim + v_dim);
    return num_rows * (sizeof(AttentionRow) + 2 * (v_dim + 2) * sizeof(float)) + tile_floats * sizeof(float);
}

void run_attention_item(const AttentionContext& context, int item, int next_item, const AttentionScratch& scratch) {
    const bool more = next_item < static_cast<int>(context.plan.items.size());
    const ItemRows rows(context, item), after(context, more ? next_item : item);
    const int last = rows.position(rows.count - 1);
    for (int base = rows.first_tile(0); base <= last; base += kKvTile) {
        const ItemRows* next = base + kKvTile <= last ? &rows : more ? &after : nullptr;
        attend_tile(rows, base, scratch, scratch.running, scratch.latest, next,
                    next == &rows ? base + kKvTile : after.lowest(0));
        for (int row = 0; row < rows.count; ++row)
            if (rows.first_tile(row) < base && rows.position(row) >= base)
                context.kernels.attention_merge(rows.at(scratch.latest, row), rows.at(scratch.running, row),
                                                rows.v_dim);
    }
    rows.finish(scratch.running);
}

void run_attention_part(const AttentionContext& context, const AttentionPart& part, const AttentionScratch& scratch) {
    const ItemRows rows(context, part.item);
    const int base = part.tile * kKvTile;
    if (base < rows.first_tile(0)) return;  // out of the window
    float* results = context.partials + static_cast<size_t>(part.partial) * context.partial_floats;
    attend_tile(rows, base, scratch, results, results);
}

void merge_attention_parts(const AttentionContext& context, int item) {
    const ItemRows rows(context, item);
    const int first = context.plan.first_partial[static_cast<size_t>(item)] + rows.first_tile(0) / kKvTile;
    const auto results = [&](int partial) {
        return context.partials + static_cast<size_t>(partial) * context.partial_floats;
    };
    for (int next = first + 1; next < context.plan.first_partial[static_cast<size_t>(item) + 1]; ++next)
        for (int row = 0; row < rows.count; ++row)
            context.kernels.attention_merge(rows.at(results(next), row), rows.at(results(first), row), rows.v_dim);
    rows.finish(results(first));
}

}  // namespace octavo
