// How a step's attention is cut into items, and how one item walks its sequence's tiles.
#pragma once

#include <vector>

#include "kv_cache.h"
#include "ops/types.h"
#include "step.h"

namespace octavo {

// Queries [query_begin, query_end) (indices into the step's tokens) of one sequence against one KV head.
struct AttentionItem {
    int seq, kv_head, query_begin, query_end;
};

// One tile of an item of one query, and where its result goes.
struct AttentionPart {
    int item, tile, partial;
};

struct AttentionPlan {
    int group;                         // query heads per KV head
    bool bf16;                         // products in bfloat16 (ops/attention_bf16.h), of a bfloat16 cache
    std::vector<AttentionItem> items;  // dearest first, so that the last to finish is a small one
    // Few one-query items, fewer than keep the threads busy: their tiles run apart and are then merged in order. The
    // arithmetic is the same, so this may depend on the number of threads.
    std::vector<AttentionPart> parts;
    std::vector<int> first_partial;  // [items + 1]
};

AttentionPlan plan_attention(const Step& step, int group, int num_kv_heads, int threads, bool bf16);

// (query, head) rows that one item holds at most.
int attention_item_rows(int group, bool bf16);

// Per thread: results of an item's rows, [rows][v_dim + 2] (acc, max, sum), and room to gather K.
struct AttentionScratch {
    AttentionScratch(uint8_t* memory, int group, int head_dim, bool bf16);
    static size_t bytes(int group, int head_dim, bool bf16);

    AttentionRow* rows;       // the rows that see the tile at hand
    float *running, *latest;  // over the tiles so far; of the tile at hand
    uint8_t* gathered;        // K through small blocks: [256 / 16][head_dim][16] elements of at most 4 bytes
    float *wide_k, *wide_v;   // the same and V, [256][v_dim], as float32; null with bf16, which widens nothing
};

struct AttentionCall {
    int layer;
    float scale, soft_cap;  // 0: no cap
    int window;             // 0: none
    Floats q, out;
    Quantised quantised;  // where the result also goes, rounded
};

// What all items of one attention call share.
struct AttentionContext {
    const Kernels& kernels;
    const Step& step;
    const KvCache& kv;
    const AttentionPlan& plan;
    AttentionCall call;
    float* partials;  // results of the plan's parts, each [group][v_dim + 2]
    size_t partial_floats;
};

// A whole item: all of its tiles, and the output. next_item: what the thread will probably take then, if there is such.
void run_attention_item(const AttentionContext& context, int item, int next_item, const AttentionScratch& scratch);
// The same in two steps with a barrier between: each tile alone, then the merge.
void run_attention_part(const AttentionContext& context, const AttentionPart& part, const AttentionScratch& scratch);
void merge_attention_parts(const AttentionContext& context, int item);

}  // namespace octavo
