// One step of a program: every phase is a stage of a shared job, its items given out one by one.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <stdexcept>

#include "attention.h"
#include "ops/int_layout.h"
#include "program.h"

namespace octavo {

namespace {

constexpr int kRotationBlock = 16;  // tokens whose sines are one item

int round_up(int n, int to) { return (n + to - 1) / to * to; }
int blocks(int n, int size) { return (n + size - 1) / size; }

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

// How a linear phase is cut: panels per item, so that each thread gets several.
int panels_per_item(const LinearPart& part, int rows, int row_blocks, int threads, bool pairs) {
    if (part.up) {  // as many as fit in a thread's scratch
        const int most = kMaxLinearRows / std::min(rows, kMaxLinearRows) * kGatedPanels;
        return round_up(std::min(blocks(part.w->panels * row_blocks, 8 * threads), most), kGatedPanels);
    }
    const int panels = std::min(blocks(part.w->panels * row_blocks, 4 * threads), 16);
    return pairs ? round_up(panels, 2) : panels;  // two panels share the loads of a tile of activations
}

// The i-th item to be given out: at an even pace, each thread walks through neighbouring ones, and what it fetches
// ahead is its own.
int nearby(int i, int items, int threads) {
    const int thread = i % threads;
    return thread * (items / threads) + std::min(thread, items % threads) + i / threads;
}

}  // namespace

// What the threads of one step share. Its functions return false if the step has ended without this thread; it must
// then return at once, for none of this exists any more.
struct Program::Run {
    // The logit rows at hand: all of them in the body, up to kSliceRows in the head.
    struct Slice {
        int first, count;
    };

    Program& p;
    const Step& step;
    const KvCache& kv;
    LogitsConsumer& consumer;
    const int num_logits;
    const AttentionPlan attention;
    std::vector<float> partials;  // of split attention
    WorkCounter* counters;
    double sample_s = 0.0;  // written by thread 0

    bool work(int thread);

  private:
    bool run_section(Section section, Slice slice, int thread, WorkCounter*& next);
    bool run_rows(const Phase& phase, Slice slice, int thread, WorkCounter*& next);
    bool run_linear(const Phase& phase, Slice slice, int thread, WorkCounter*& next);
    bool run_attention(const AttentionSpec& spec, int thread, WorkCounter*& next);
    void run_linear_item(const Phase& phase, const LinearPart& part, Slice slice, int row_begin, int row_end,
                         int panel_begin, int panel_end, const uint16_t* turned, int thread);
    void run_row_op(const RowOp& op, Slice slice, int row, int rows);
    void rope_row(const RowOp& op, int row, const float* in, float* out);
    void write_kv_row(const RowOp& op, int row, const float* k, const float* v);
    void norm_heads(const RowOp& op, const float* in, float* out);
    void rotate_token(const Rotation& rotation, int token);
    float position_factor(const RowOp& op, int row) const;

    const Buffer& buffer(int id) const { return p.buffers_[static_cast<size_t>(id)]; }
    // The head reads its slice in the place where the body left it.
    Floats floats(int id, Slice slice) const {
        if (id != p.rows_) return buffer(id).floats;
        const Floats& hidden = buffer(p.hidden_).floats;
        return {hidden.data + static_cast<size_t>(slice.first) * hidden.stride, hidden.stride};
    }
    // A quantised buffer with the forms that this step's `rows` rows take; the other one is null.
    Quantised quantised(int id, int rows) const {
        const Buffer& b = buffer(id);
        Quantised to = b.quants;
        const bool int8 = p.activations_ == Activations::kInt8 || p.few(rows);
        if (!int8) to.q = nullptr;
        if (int8 && !b.for_bf16) to.tiles = nullptr;
        return to;
    }
    Linear linear(const Matrix& w, int rows) const {
        const auto kind = static_cast<size_t>(w.kind);
        if (!reads_quantised(w.kind, p.activations_)) return p.kernels_.linear_float[kind];
        const bool int8 = p.activations_ == Activations::kInt8 || (is_integer(w.kind) && p.few(rows));
        return int8 ? p.kernels_.linear_int8[kind] : p.kernels_.linear_bf16[kind];
    }
    // Whether a product takes its rows as columns too, LinearTask::columns.
    bool takes_columns(const Matrix& w, int rows) const {
        return p.kernels_.to_columns && rows > 1 && rows <= kMaxColumns && is_int4(w.kind) &&
               linear(w, rows) == p.kernels_.linear_bf16[static_cast<size_t>(w.kind)];
    }
    int rows_of(Domain domain, Slice slice) const {
        return domain == Domain::kTokens ? step.num_tokens() : slice.count;
    }
};

double Program::run(const Step& step, const KvCache& kv, LogitsConsumer& consumer, int num_logits) {
    const KvShape& s = kv.shape();
    if (s.num_kv_heads != shape_.num_kv_heads || s.head_dim != shape_.head_dim || kv.num_layers() < num_layers_)
        throw std::invalid_argument("the KV cache has other layers, heads or head_dim than the model");
    for (const Phase& phase : sections_[static_cast<int>(Section::kBody)]) {
        if (phase.kind != Phase::Kind::kAttention) continue;
        const int kept = kv.group(kv.group_of(phase.attention.layer)).window, seen = phase.attention.window;
        if (kept && (!seen || seen > kept))
            throw std::invalid_argument("layer " + std::to_string(phase.attention.layer) +
                                        " attends to more than its group of the KV cache keeps");
    }
    check_step(step, {max_tokens_, max_seqs_, shape_.vocab_size}, kv);
    const int group = shape_.num_heads / shape_.num_kv_heads;
    const bool bf16 = activations_ != Activations::kInt8 && s.bf16();
    const auto slices = static_cast<size_t>(blocks(num_logits, kSliceRows));
    WorkCounter* counters = pool_.counters(2 + 2 * sections_[0].size() + slices * (2 * sections_[1].size() + 1));
    AttentionPlan plan = plan_attention(step, group, shape_.num_kv_heads, pool_.size(), bf16);
    Run run{*this, step, kv, consumer, num_logits, std::move(plan), {}, counters};
    run.partials.resize(run.attention.parts.size() * static_cast<size_t>(group) * static_cast<size_t>(s.v_dim() + 2));
    pool_.run_shared([](void* context, int thread) { return static_cast<Run*>(context)->work(thread); }, &run);
    return run.sample_s;
}

bool Program::Run::work(int thread) {
    WorkCounter* next = counters;
    const auto copy = [&](int i) {
        const int32_t* c = step.copies.data() + 4 * static_cast<size_t>(i);
        std::memcpy(kv.block(c[0], c[2]), kv.block(c[0], c[1]), kv.block_bytes(c[0]));
    };
    if (!p.pool_.stage(*next++, static_cast<uint32_t>(step.copies.size() / 4), thread, copy)) return false;
    const auto rotate = [&](int i) {
        const int end = std::min(step.num_tokens(), (i + 1) * kRotationBlock);
        for (const Rotation& rotation : p.rotations_)
            for (int token = i * kRotationBlock; token < end; ++token) rotate_token(rotation, token);
    };
    const auto rotations = static_cast<uint32_t>(blocks(step.num_tokens(), kRotationBlock));
    if (!p.pool_.stage(*next++, rotations, thread, rotate)) return false;
    if (!run_section(Section::kBody, {0, step.num_rows()}, thread, next)) return false;
    double sampling = 0.0;
    for (int first = 0; first < num_logits; first += kSliceRows) {
        const Slice slice{first, std::min(kSliceRows, num_logits - first)};
        if (!run_section(Section::kHead, slice, thread, next)) return false;
        const double begin = now();
        const Floats& logits = buffer(p.logits_).floats;
        const auto consume = [&](int row) {
            consumer.consume(logits.data + static_cast<size_t>(row) * logits.stride, first + row, thread);
        };
        if (!p.pool_.stage(*next++, static_cast<uint32_t>(slice.count), thread, consume)) return false;
        sampling += now() - begin;
    }
    if (thread == 0) sample_s = sampling;
    return true;
}

bool Program::Run::run_section(Section section, Slice slice, int thread, WorkCounter*& next) {
    for (const Phase& phase : p.sections_[static_cast<int>(section)]) {
        bool inside = false;
        switch (phase.kind) {
            case Phase::Kind::kRows:
                inside = run_rows(phase, slice, thread, next);
                break;
            case Phase::Kind::kLinear:
                inside = run_linear(phase, slice, thread, next);
                break;
            case Phase::Kind::kAttention:
                inside = run_attention(phase.attention, thread, next);
                break;
        }
        if (!inside) return false;
    }
    return true;
}

bool Program::Run::run_rows(const Phase& phase, Slice slice, int thread, WorkCounter*& next) {
    const int rows = rows_of(phase.domain, slice);
    const int block = std::clamp(rows / (4 * p.pool_.size()), 1, 16);
    return p.pool_.stage(*next++, static_cast<uint32_t>(blocks(rows, block)), thread, [&](int i) {
        for (int row = i * block; row < std::min(rows, (i + 1) * block); ++row)
            for (const RowOp& op : phase.ops) run_row_op(op, slice, row, rows);
    });
}

bool Program::Run::run_linear(const Phase& phase, Slice slice, int thread, WorkCounter*& next) {
    const int rows = rows_of(phase.domain, slice), row_block = p.kernels_.linear_rows;
    const int row_blocks = blocks(rows, row_block);
    const int threads = p.pool_.size();
    const bool pairs = p.activations_ != Activations::kInt8;
    int items = 0;  // of one block of rows: the panels of all parts
    for (const LinearPart& part : phase.parts)
        items += blocks(part.w->panels, panels_per_item(part, rows, row_blocks, threads, pairs));
    const auto turned = p.kernels_.to_columns ? p.columns_[static_cast<size_t>(thread)].as<uint16_t>() : nullptr;
    int in_turned = -1;  // the buffer that this thread has turned into columns
    return p.pool_.stage(*next++, static_cast<uint32_t>(items * row_blocks), thread, [&](int i) {
        // As many blocks of rows at a time as there are threads, in turns: at an even pace a thread stays with its
        // rows, whose activations then lie in its own cache.
        const int first = i / (items * threads) * threads, side_by_side = std::min(threads, row_blocks - first);
        const int within = i - first * items;
        const int row_begin = (first + within % side_by_side) * row_block;
        const int row_end = std::min(rows, row_begin + row_block);
        int rest = row_blocks == 1 ? nearby(i, items, threads) : within / side_by_side;
        for (const LinearPart& part : phase.parts) {
            const int panels = panels_per_item(part, rows, row_blocks, threads, pairs);
            const int count = blocks(part.w->panels, panels);
            if (rest < count) {
                const int panel_end = std::min(part.w->panels, (rest + 1) * panels);
                const bool turn = takes_columns(*part.w, rows);
                if (turn && in_turned != part.in)
                    p.kernels_.to_columns(buffer(in_turned = part.in).quants, rows, turned);
                return run_linear_item(phase, part, slice, row_begin, row_end, rest * panels, panel_end,
                                       turn ? turned : nullptr, thread);
            }
            rest -= count;
        }
    });
}

void Program::Run::run_linear_item(const Phase& phase, const LinearPart& part, Slice slice, int row_begin, int row_end,
                                   int panel_begin, int panel_end, const uint16_t* turned, int thread) {
    const Kernels& kernels = p.kernels_;
    const int rows = rows_of(phase.domain, slice);
    const Linear multiply = linear(*part.w, rows);
    const Quantised rounded = part.quantised_out < 0 ? Quantised{} : quantised(part.quantised_out, rows);
    const int column = panel_begin * kPanel, columns = (panel_end - panel_begin) * kPanel;
    const auto n = static_cast<size_t>(columns);
    float* gate = p.scratch_[static_cast<size_t>(thread)].as<float>();
    float* up = gate + kMaxLinearRows * kGatedPanels * kPanel;
    Floats out{gate, n};  // of this item, if nobody reads it as floats
    if (part.out >= 0) {
        out = buffer(part.out).floats;
        out.data += static_cast<size_t>(row_begin) * out.stride + column;
    }
    LinearTask task{part.w,
                    floats(part.in, slice),
                    buffer(part.in).quants,
                    row_begin,
                    row_end,
                    panel_begin,
                    panel_end,
                    out.data,
                    out.stride,
                    turned};
    if (part.up) {
        task.out = gate;
        task.out_stride = n;
        multiply(task);
        task.w = part.up;
        task.out = up;
    }
    multiply(task);
    for (int row = 0; row < row_end - row_begin; ++row) {
        float* y = out.data + row * out.stride;
        if (part.up) kernels.gated_mul(part.gate, gate + row * n, up + row * n, n, y);
        if (part.bias) kernels.add(y, part.bias + column, n, y);
        if (part.residual >= 0) {
            const Floats residual = floats(part.residual, slice);
            kernels.add(residual.data + static_cast<size_t>(row_begin + row) * residual.stride + column, y, n, y);
        }
        round_row(kernels, y, columns, rounded, static_cast<size_t>(row_begin + row), static_cast<size_t>(column));
    }
}

void Program::Run::run_row_op(const RowOp& op, Slice slice, int row, int rows) {
    const Kernels& kernels = p.kernels_;
    const auto r = static_cast<size_t>(row);
    const auto at = [&](int id) {
        const Floats f = floats(id, slice);
        return f.data + r * f.stride;
    };
    const auto width = [&](int id) { return static_cast<size_t>(round_up(buffer(id).width, kPanel)); };
    switch (op.kind) {
        case RowOpKind::kEmbedding:
            kernels.dequantise_row(*op.table, step.token_ids[r], at(op.out));
            break;
        case RowOpKind::kRmsNorm:
            norm_heads(op, at(op.a), at(op.out));
            break;
        case RowOpKind::kLayerNorm:
            kernels.layer_norm(at(op.a), op.weight, op.bias, buffer(op.a).width, op.value, at(op.out));
            break;
        case RowOpKind::kQuantise:
            round_row(kernels, at(op.a), buffer(op.a).width, quantised(op.out, rows), r, 0);
            break;
        case RowOpKind::kRope:
            rope_row(op, row, at(op.a), at(op.out));
            break;
        case RowOpKind::kWriteKv:
            write_kv_row(op, row, at(op.a), at(op.b));
            break;
        case RowOpKind::kGatedMul:
            kernels.gated_mul(op.gate, at(op.a), at(op.b), width(op.out), at(op.out));
            break;
        case RowOpKind::kActivation:
            kernels.activation(op.gate, at(op.a), width(op.out), at(op.out));
            break;
        case RowOpKind::kAdd:
            kernels.add(at(op.a), at(op.b), width(op.out), at(op.out));
            break;
        case RowOpKind::kScale:
            kernels.scale(at(op.a), op.value, width(op.out), at(op.out));
            break;
        case RowOpKind::kScaleByPosition:
            kernels.scale(at(op.a), position_factor(op, row), width(op.out), at(op.out));
            break;
        case RowOpKind::kSelectRows: {
            const Floats from = floats(op.a, slice);
            std::memcpy(at(op.out), from.data + static_cast<size_t>(step.logit_rows[r]) * from.stride,
                        from.stride * sizeof(float));
            break;
        }
        case RowOpKind::kSoftCap:
            kernels.soft_cap(at(op.a), op.value, width(op.out), at(op.out));
            break;
    }
}

void Program::Run::norm_heads(const RowOp& op, const float* in, float* out) {
    const int size = buffer(op.a).width / op.count;
    for (int begin = 0; begin < op.count * size; begin += size)
        p.kernels_.rms_norm(in + begin, op.weight, size, op.value, out + begin);
}

void Program::Run::rope_row(const RowOp& op, int row, const float* in, float* out) {
    const Rotation& rotation = p.rotations_[static_cast<size_t>(op.rotation)];
    const float* cos = rotation.row(row);
    if (in != out) std::memcpy(out, in, sizeof(float) * static_cast<size_t>(op.count) * p.shape_.head_dim);
    p.kernels_.rope({out, op.count, p.shape_.head_dim, rotation.dim, cos, cos + rotation.half()});
}

// 1 + beta ln(1 + the number of whole steps that the position is beyond)
float Program::Run::position_factor(const RowOp& op, int row) const {
    const int64_t position = int64_t{step.positions[static_cast<size_t>(row)]} + op.shift;
    return static_cast<float>(1.0 + double{op.value} * std::log1p(static_cast<double>(position / op.count)));
}

void Program::Run::write_kv_row(const RowOp& op, int row, const float* k, const float* v) {
    const int slot = step.slot(kv.group_of(op.count), row);
    if (slot < 0) return;
    const KvShape& s = kv.shape();
    const int offset = slot % s.block_size;
    uint8_t* base = kv.layer(slot / s.block_size, op.count);
    KvWriteTask task{k,
                     v,
                     s.num_kv_heads,
                     s.head_dim,
                     s.v_dim(),
                     nullptr,
                     nullptr,
                     s.head_elements(),
                     static_cast<size_t>(s.block_size),
                     s.bf16()};
    task.k_out = base + static_cast<size_t>(offset) * s.element_bytes();
    task.v_out = base + (s.k_elements() + static_cast<size_t>(offset) * s.v_dim()) * s.element_bytes();
    p.kernels_.write_kv(task);
}

void Program::Run::rotate_token(const Rotation& rotation, int token) {
    const int half = rotation.half();
    float* cos = rotation.row(token);
    for (size_t i = 0; i < rotation.frequencies.size(); ++i) {
        const double angle = step.positions[static_cast<size_t>(token)] * rotation.frequencies[i];
        cos[i] = static_cast<float>(std::cos(angle) * rotation.factor);
        cos[static_cast<size_t>(half) + i] = static_cast<float>(std::sin(angle) * rotation.factor);
    }
}

bool Program::Run::run_attention(const AttentionSpec& spec, int thread, WorkCounter*& next) {
    const Quantised rounded = spec.quantised_out < 0 ? Quantised{} : quantised(spec.quantised_out, step.num_tokens());
    const AttentionCall call{
        spec.layer, spec.scale, spec.soft_cap, spec.window, buffer(spec.q).floats, buffer(spec.out).floats, rounded};
    const size_t partial_floats = static_cast<size_t>(attention.group) * static_cast<size_t>(kv.shape().v_dim() + 2);
    const AttentionContext context{p.kernels_, step, kv, attention, call, partials.data(), partial_floats};
    const AttentionScratch scratch(p.scratch_[static_cast<size_t>(thread)].data(), attention.group, p.shape_.head_dim,
                                   attention.bf16);
    const bool split = !attention.parts.empty();
    const auto run_part = [&](int i) { run_attention_part(context, attention.parts[static_cast<size_t>(i)], scratch); };
    if (!p.pool_.stage(*next++, static_cast<uint32_t>(attention.parts.size()), thread, run_part)) return false;
    return p.pool_.stage(*next++, static_cast<uint32_t>(attention.items.size()), thread, [&](int i) {
        split ? merge_attention_parts(context, i) : run_attention_item(context, i, i + p.pool_.size(), scratch);
    });
}

}  // namespace octavo
