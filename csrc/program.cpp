#include "program.h"

#include <algorithm>
#include <chrono>
#include <climits>
#include <cmath>
#include <cstring>
#include <limits>
#include <stdexcept>

#include "attention.h"

namespace octavo {

namespace {

constexpr int kGatedPanels = 2;  // panels of one gated item: a whole group of 32 columns, so that it can be quantised

int round_up(int n, int to) { return (n + to - 1) / to * to; }

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

// How a linear phase is cut: panels per item, so that each thread gets several.
int panels_per_item(const LinearPart& part, int row_blocks, int threads) {
    const int items_wanted = 8 * threads;
    const int panels = part.w->panels * row_blocks / items_wanted;
    const int step = part.up ? kGatedPanels : 1;
    return std::clamp(panels / step * step, step, part.up ? kGatedPanels : 16);
}

}  // namespace

bool is_integer(const Matrix& m) {
    return m.kind == WeightKind::kInt8 || m.kind == WeightKind::kInt4 || m.kind == WeightKind::kInt4Z;
}

struct Program::Run {
    const Step& step;
    const KvCache& kv;
    LogitsConsumer& consumer;
    AttentionPlan attention;
    std::vector<float> partials;  // of split attention
    int slice_first = 0, slice_rows = 0;
    double body_s = 0.0, head_s = 0.0;
};

Program::Program(const Kernels& kernels, ThreadPool& pool, const ModelShape& shape,
                 std::vector<double> inverse_frequencies)
    : kernels_(kernels), pool_(pool), shape_(shape), inverse_frequencies_(std::move(inverse_frequencies)) {
    if (shape.num_heads < 1 || shape.num_kv_heads < 1 || shape.num_heads % shape.num_kv_heads)
        throw std::invalid_argument("num_heads must be a positive multiple of num_kv_heads");
    if (shape.head_dim < 1 || shape.rope_dim > shape.head_dim || shape.rope_dim % 2 ||
        inverse_frequencies_.size() != static_cast<size_t>(shape.rope_dim / 2))
        throw std::invalid_argument("rope_dim must be even, at most head_dim, with one frequency per pair");
}

int Program::add_buffer(Domain domain, int width, bool quantised) {
    if (width < 1 || (quantised && width % kGroup))
        throw std::invalid_argument("a buffer's width is " + std::to_string(width) +
                                    " but must be positive, and a multiple of 32 if it holds int8");
    Buffer buffer;
    buffer.domain = domain;
    buffer.width = width;
    buffer.quantised = quantised;
    buffers_.push_back(std::move(buffer));
    return static_cast<int>(buffers_.size()) - 1;
}

Phase& Program::phase_for(Section section, Phase::Kind kind, Domain domain) {
    std::vector<Phase>& phases = sections_[static_cast<int>(section)];
    const bool joins =
        kind == Phase::Kind::kRows && !phases.empty() && phases.back().kind == kind && phases.back().domain == domain;
    if (!joins) phases.push_back(Phase{kind, domain, {}, {}, {}});
    return phases.back();
}

void Program::add_row_op(Section section, Domain domain, const RowOp& op) {
    if (op.kind == RowOpKind::kWriteKv) num_layers_ = std::max(num_layers_, op.count + 1);
    phase_for(section, Phase::Kind::kRows, domain).ops.push_back(op);
}

void Program::add_linear(Section section, Domain domain, std::vector<LinearPart> parts) {
    for (const LinearPart& part : parts) {
        const Buffer& in = buffers_.at(static_cast<size_t>(part.in));
        const Buffer& out = buffers_.at(static_cast<size_t>(part.out));
        if (in.width != part.w->cols || in.quantised != is_integer(*part.w) || out.width != part.w->rows ||
            out.quantised)
            throw std::invalid_argument("a linear layer of " + std::to_string(part.w->rows) + " x " +
                                        std::to_string(part.w->cols) + " does not fit its buffers");
        if (part.up &&
            (part.up->rows != part.w->rows || part.up->cols != part.w->cols || part.up->kind != part.w->kind))
            throw std::invalid_argument("gate and up of one gated product must have one shape and packing");
    }
    phase_for(section, Phase::Kind::kLinear, domain).parts = std::move(parts);
}

void Program::add_attention(const AttentionSpec& spec) {
    if (spec.layer < 0) throw std::invalid_argument("a layer is negative");
    num_layers_ = std::max(num_layers_, spec.layer + 1);
    phase_for(Section::kBody, Phase::Kind::kAttention, Domain::kTokens).attention = spec;
}

void Program::finish(int hidden, int rows, int logits, int max_tokens, int max_seqs) {
    hidden_ = hidden;
    rows_ = rows;
    logits_ = logits;
    max_tokens_ = max_tokens;
    max_seqs_ = max_seqs;
    for (size_t i = 0; i < buffers_.size(); ++i) {
        Buffer& b = buffers_[i];
        // Rows of the body: as many as tokens (prompt logprobs); of the head: one slice.
        const bool head_only = static_cast<int>(i) == rows || static_cast<int>(i) == logits;
        b.max_rows = b.domain == Domain::kTokens || !head_only ? max_tokens : std::min(max_tokens, kSliceRows);
        const auto n = static_cast<size_t>(b.max_rows);
        if (b.quantised) {
            const size_t groups = static_cast<size_t>(b.width / kGroup);
            b.pages = PageBuffer(n * b.width + 64 + 3 * n * groups * sizeof(float));
            b.quants.scale = b.pages.as<float>();
            b.quants.sum = b.quants.scale + n * groups;
            b.quants.total = reinterpret_cast<int32_t*>(b.quants.sum + n * groups);
            b.quants.q = reinterpret_cast<int8_t*>(b.quants.total + n * groups);
            b.quants.cols = static_cast<size_t>(b.width);
        } else if (static_cast<int>(i) != rows) {
            b.floats.stride = static_cast<size_t>(round_up(b.width, kPanel));
            b.pages = PageBuffer(n * b.floats.stride * sizeof(float));
            b.floats.data = b.pages.as<float>();
        }
    }
    const size_t linear_bytes = 2 * sizeof(float) * kMaxLinearRows * kGatedPanels * kPanel;
    const size_t attention_bytes = AttentionScratch::bytes(shape_.num_heads / shape_.num_kv_heads, shape_.head_dim);
    for (int t = 0; t < pool_.size(); ++t) scratch_.emplace_back(std::max(linear_bytes, attention_bytes));
    const size_t half = static_cast<size_t>(round_up(std::max(shape_.rope_dim / 2, 1), kPanel));
    rotations_ = PageBuffer(static_cast<size_t>(max_tokens) * 2 * half * sizeof(float));
    const size_t phases = sections_[0].size() + sections_[1].size();
    counters_ = std::make_unique<std::atomic<int>[]>(2 * phases);
}

Floats Program::floats(int buffer, int rows) const {
    const Buffer& b = buffers_.at(static_cast<size_t>(buffer));
    if (b.quantised || rows < 0 || rows > b.max_rows) throw std::out_of_range("no such rows of floats");
    return b.floats;
}

int Program::domain_rows(const Run& run, Domain domain) const {
    return domain == Domain::kTokens ? run.step.num_tokens() : run.slice_rows;
}

std::pair<double, double> Program::run(const Step& step, const KvCache& kv, LogitsConsumer& consumer) {
    const KvShape& s = kv.shape();
    if (s.num_kv_heads != shape_.num_kv_heads || s.head_dim != shape_.head_dim || s.num_layers < num_layers_)
        throw std::invalid_argument("the KV cache has other layers, heads or head_dim than the model");
    check_step(step, {max_tokens_, max_seqs_, shape_.vocab_size}, s);
    const int group = shape_.num_heads / shape_.num_kv_heads;
    Run run{step, kv, consumer, plan_attention(step, group, shape_.num_kv_heads, pool_.size()), {}};
    run.partials.resize(run.attention.parts.size() * static_cast<size_t>(group) * static_cast<size_t>(s.v_dim() + 2));
    struct Context {
        Program* program;
        Run* run;
    } context{this, &run};
    pool_.run(
        [](void* c, int thread) {
            auto* x = static_cast<Context*>(c);
            x->program->work(*x->run, thread);
        },
        &context);
    return {run.body_s, run.head_s};
}

void Program::work(Run& run, int thread) {
    const double start = now();
    const Step& step = run.step;
    const int threads = pool_.size();
    for (size_t i = static_cast<size_t>(thread); i * 3 < step.copies.size(); i += static_cast<size_t>(threads))
        std::memcpy(run.kv.block(step.copies[3 * i + 1]), run.kv.block(step.copies[3 * i]),
                    run.kv.shape().block_bytes());
    for (int t = thread; t < step.num_tokens(); t += threads) rotate_token(step, t);
    if (thread == 0) run.slice_rows = step.num_rows();
    pool_.barrier();
    run_section(run, Section::kBody, thread);
    double sampling = 0.0;
    for (int first = 0; first < step.num_rows(); first += kSliceRows) {
        const int count = std::min(kSliceRows, step.num_rows() - first);
        if (thread == 0) {
            run.slice_rows = count;
            const Buffer& hidden = buffers_[static_cast<size_t>(hidden_)];
            buffers_[static_cast<size_t>(rows_)].floats = {
                hidden.floats.data + static_cast<size_t>(first) * hidden.floats.stride, hidden.floats.stride};
        }
        pool_.barrier();
        run_section(run, Section::kHead, thread);
        const double begin = now();
        run.consumer.consume(buffers_[static_cast<size_t>(logits_)].floats, first, count, thread);
        pool_.barrier();
        sampling += now() - begin;
    }
    if (thread == 0) {
        run.head_s = sampling;
        run.body_s = now() - start - sampling;
    }
}

void Program::rotate_token(const Step& step, int t) {
    const int pairs = shape_.rope_dim / 2;
    const int half = round_up(std::max(pairs, 1), kPanel);
    float* cos = rotations_.as<float>() + static_cast<size_t>(t) * 2 * half;
    for (int i = 0; i < pairs; ++i) {
        const double angle = step.positions[t] * inverse_frequencies_[static_cast<size_t>(i)];
        cos[i] = static_cast<float>(std::cos(angle));
        cos[half + i] = static_cast<float>(std::sin(angle));
    }
}

void Program::run_section(Run& run, Section section, int thread) {
    const std::vector<Phase>& phases = sections_[static_cast<int>(section)];
    std::atomic<int>* next = counters_.get() + (section == Section::kHead ? 2 * sections_[0].size() : 0);
    for (size_t i = 0; i < phases.size(); ++i) {
        switch (phases[i].kind) {
            case Phase::Kind::kRows:
                run_rows(run, phases[i], next[2 * i]);
                break;
            case Phase::Kind::kLinear:
                run_linear(run, phases[i], next[2 * i], thread);
                break;
            case Phase::Kind::kAttention:
                run_attention(run, phases[i].attention, next + 2 * i, thread);
                break;
        }
        pool_.barrier();
        if (thread == 0) next[2 * i].store(0, std::memory_order_relaxed);  // used again only after another barrier
    }
}

void Program::run_rows(Run& run, const Phase& phase, std::atomic<int>& next) {
    const int rows = domain_rows(run, phase.domain);
    const int block = std::clamp(rows / (4 * pool_.size()), 1, 16);
    for (int first; (first = next.fetch_add(block, std::memory_order_relaxed)) < rows;)
        for (int row = first; row < std::min(rows, first + block); ++row)
            for (const RowOp& op : phase.ops) run_row_op(run, op, row);
}

void Program::run_linear(Run& run, const Phase& phase, std::atomic<int>& next, int thread) {
    const int rows = domain_rows(run, phase.domain);
    const int row_blocks = (rows + kMaxLinearRows - 1) / kMaxLinearRows;
    int item = next.fetch_add(1, std::memory_order_relaxed), first_item = 0;
    for (int block = 0; block < row_blocks; ++block) {
        for (const LinearPart& part : phase.parts) {
            const int panels = panels_per_item(part, row_blocks, pool_.size());
            const int items = (part.w->panels + panels - 1) / panels;
            while (item < first_item + items) {
                const int panel = (item - first_item) * panels;
                run_linear_item(part, block * kMaxLinearRows, std::min(rows, (block + 1) * kMaxLinearRows), panel,
                                std::min(part.w->panels, panel + panels), thread);
                item = next.fetch_add(1, std::memory_order_relaxed);
            }
            first_item += items;
        }
    }
}

void Program::run_linear_item(const LinearPart& part, int row_begin, int row_end, int panel_begin, int panel_end,
                              int thread) {
    const Buffer& in = buffers_[static_cast<size_t>(part.in)];
    const Buffer& out = buffers_[static_cast<size_t>(part.out)];
    const int column = panel_begin * kPanel, columns = (panel_end - panel_begin) * kPanel;
    float* target = out.floats.data + static_cast<size_t>(row_begin) * out.floats.stride + column;
    LinearTask task{part.w,      in.floats, in.quants, row_begin,        row_end,
                    panel_begin, panel_end, target,    out.floats.stride};
    const auto kind = static_cast<size_t>(part.w->kind);
    const auto n = static_cast<size_t>(columns);
    if (part.up) {
        float* gate = scratch_[static_cast<size_t>(thread)].as<float>();
        float* up = gate + kMaxLinearRows * kGatedPanels * kPanel;
        task.out = gate;
        task.out_stride = n;
        kernels_.linear[kind](task);
        task.w = part.up;
        task.out = up;
        kernels_.linear[kind](task);
        for (int row = 0; row < row_end - row_begin; ++row)
            kernels_.gated_mul(part.gate, gate + row * n, up + row * n, n, target + row * out.floats.stride);
    } else {
        kernels_.linear[kind](task);
    }
    for (int row = 0; row < row_end - row_begin; ++row) {
        float* y = target + row * out.floats.stride;
        if (part.bias) kernels_.add(y, part.bias + column, n, y);
        if (part.residual >= 0) {
            const Floats& residual = buffers_[static_cast<size_t>(part.residual)].floats;
            kernels_.add(residual.data + static_cast<size_t>(row_begin + row) * residual.stride + column, y, n, y);
        }
        if (part.quantised_out >= 0) {
            const Quantised& q = buffers_[static_cast<size_t>(part.quantised_out)].quants;
            kernels_.quantise(y, columns, q, static_cast<size_t>(row_begin + row), static_cast<size_t>(column));
        }
    }
}

void Program::run_row_op(Run& run, const RowOp& op, int row) {
    const auto r = static_cast<size_t>(row);
    const auto floats = [&](int id) {
        const Floats& f = buffers_[static_cast<size_t>(id)].floats;
        return f.data + r * f.stride;
    };
    const auto width = [&](int id) {
        return static_cast<size_t>(round_up(buffers_[static_cast<size_t>(id)].width, kPanel));
    };
    switch (op.kind) {
        case RowOpKind::kEmbedding:
            kernels_.dequantise_row(*op.table, run.step.token_ids[r], floats(op.out));
            break;
        case RowOpKind::kRmsNorm:
            kernels_.rms_norm(floats(op.a), op.weight, buffers_[static_cast<size_t>(op.a)].width, op.value,
                              floats(op.out));
            break;
        case RowOpKind::kQuantise: {
            const Quantised& q = buffers_[static_cast<size_t>(op.out)].quants;
            kernels_.quantise(floats(op.a), static_cast<int>(q.cols), q, r, 0);
            break;
        }
        case RowOpKind::kRope:
            rope_row(op, row, floats(op.a), floats(op.out));
            break;
        case RowOpKind::kWriteKv:
            write_kv_row(run, op, row, floats(op.a), floats(op.b));
            break;
        case RowOpKind::kGatedMul:
            kernels_.gated_mul(op.gate, floats(op.a), floats(op.b), width(op.out), floats(op.out));
            break;
        case RowOpKind::kAdd:
            kernels_.add(floats(op.a), floats(op.b), width(op.out), floats(op.out));
            break;
        case RowOpKind::kScale:
            kernels_.scale(floats(op.a), op.value, width(op.out), floats(op.out));
            break;
        case RowOpKind::kSelectRows: {
            const Floats& from = buffers_[static_cast<size_t>(op.a)].floats;
            std::memcpy(floats(op.out), from.data + static_cast<size_t>(run.step.logit_rows[r]) * from.stride,
                        from.stride * sizeof(float));
            break;
        }
        case RowOpKind::kSoftCap:
            kernels_.soft_cap(floats(op.a), op.value, width(op.out), floats(op.out));
            break;
    }
}

void Program::rope_row(const RowOp& op, int row, const float* in, float* out) {
    const int half = round_up(std::max(shape_.rope_dim / 2, 1), kPanel);
    const float* cos = rotations_.as<float>() + static_cast<size_t>(row) * 2 * half;
    if (in != out) std::memcpy(out, in, sizeof(float) * static_cast<size_t>(op.count) * shape_.head_dim);
    kernels_.rope({out, op.count, shape_.head_dim, shape_.rope_dim, cos, cos + half});
}

void Program::write_kv_row(const Run& run, const RowOp& op, int row, const float* k, const float* v) {
    const int slot = run.step.slot_mapping[static_cast<size_t>(row)];
    if (slot < 0) return;
    const KvShape& s = run.kv.shape();
    const int offset = slot % s.block_size;
    uint8_t* base = run.kv.layer(slot / s.block_size, op.count);
    KvWriteTask task{k,
                     v,
                     s.num_kv_heads,
                     s.head_dim,
                     s.v_dim(),
                     nullptr,
                     nullptr,
                     s.head_elements(),
                     static_cast<size_t>(s.block_size),
                     s.bf16};
    task.k_out = base + static_cast<size_t>(offset) * s.element_bytes();
    task.v_out = base + (s.k_elements() + static_cast<size_t>(offset) * s.v_dim()) * s.element_bytes();
    kernels_.write_kv(task);
}

void Program::run_attention(Run& run, const AttentionSpec& spec, std::atomic<int>* next, int thread) {
    const AttentionPlan& plan = run.attention;
    const Floats& q = buffers_[static_cast<size_t>(spec.q)].floats;
    const Floats& out = buffers_[static_cast<size_t>(spec.out)].floats;
    const AttentionScratch scratch(scratch_[static_cast<size_t>(thread)].data(), plan.group, shape_.head_dim);
    const size_t partial_floats = static_cast<size_t>(plan.group) * static_cast<size_t>(run.kv.shape().v_dim() + 2);
    const AttentionContext context{kernels_,
                                   run.step,
                                   run.kv,
                                   plan,
                                   {spec.layer, spec.scale, spec.soft_cap, spec.window, q, out},
                                   run.partials.data(),
                                   partial_floats};
    const auto items = static_cast<int>(plan.items.size()), parts = static_cast<int>(plan.parts.size());
    if (parts > 0) {
        for (int i; (i = next[1].fetch_add(1, std::memory_order_relaxed)) < parts;)
            run_attention_part(context, plan.parts[static_cast<size_t>(i)], scratch);
        pool_.barrier();
        if (thread == 0) next[1].store(0, std::memory_order_relaxed);
    }
    for (int i; (i = next[0].fetch_add(1, std::memory_order_relaxed)) < items;)
        parts > 0 ? merge_attention_parts(context, i) : run_attention_item(context, i, scratch);
}

}  // namespace octavo
