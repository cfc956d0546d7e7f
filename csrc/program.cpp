#include "program.h"

#include <algorithm>
#include <stdexcept>

#include "attention.h"
#include "ops/int_layout.h"

namespace octavo {

namespace {

int round_up(int n, int to) { return (n + to - 1) / to * to; }

// The forms that a quantised buffer's readers take. Integer weights have whole groups of 32 columns.
void allocate_quantised(Buffer& b, Activations activations) {
    const auto n = static_cast<size_t>(b.max_rows), width = static_cast<size_t>(b.width);
    const size_t groups = width / kGroup, k_tiles = (width + kGroup - 1) / kGroup;
    const bool int8 = b.for_integer && activations != Activations::kBf16;
    const bool bf16 = b.for_bf16 || (b.for_integer && activations != Activations::kInt8);
    const size_t tile_bytes = bf16 ? (n + kTileRows - 1) / kTileRows * kTileRows * k_tiles * kGroup * 2 : 0;
    const size_t arrays = b.for_halves ? 4 : 3;  // of one number per group
    b.pages = PageBuffer(tile_bytes + (int8 ? n * width + 64 + arrays * n * groups * sizeof(float) : 0));
    b.quants = {};
    if (bf16) {
        b.quants.tiles = b.pages.as<uint16_t>();  // first: tiles of 1 KB are aligned
        b.quants.k_tiles = k_tiles;
    }
    if (int8) {
        b.quants.scale = reinterpret_cast<float*>(b.pages.data() + tile_bytes);
        b.quants.sum = b.quants.scale + n * groups;
        b.quants.total = reinterpret_cast<int32_t*>(b.quants.sum + n * groups);
        if (b.for_halves) b.quants.low = b.quants.total + n * groups;
        b.quants.q = reinterpret_cast<int8_t*>(b.quants.scale + arrays * n * groups);
        b.quants.cols = width;
    }
}

}  // namespace

Program::Program(const Kernels& kernels, Activations activations, ThreadPool& pool, const ModelShape& shape)
    : kernels_(kernels), activations_(activations), pool_(pool), shape_(shape) {
    if (shape.num_heads < 1 || shape.num_kv_heads < 1 || shape.num_heads % shape.num_kv_heads)
        throw std::invalid_argument("num_heads must be a positive multiple of num_kv_heads");
    if (shape.head_dim < 1) throw std::invalid_argument("head_dim must be positive");
}

int Program::add_rotation(std::vector<double> frequencies, double factor) {
    const size_t dim = 2 * frequencies.size();
    if (dim > static_cast<size_t>(shape_.head_dim))
        throw std::invalid_argument("a rotation has " + std::to_string(dim) + " dimensions but a head has " +
                                    std::to_string(shape_.head_dim));
    rotations_.push_back({static_cast<int>(dim), std::move(frequencies), factor, {}});
    return static_cast<int>(rotations_.size()) - 1;
}

int Program::add_buffer(Domain domain, int width, bool quantised) {
    if (width < 1)
        throw std::invalid_argument("a buffer's width is " + std::to_string(width) + " but must be positive");
    Buffer buffer;
    buffer.domain = domain;
    buffer.width = width;
    buffer.quantised = quantised;
    buffers_.push_back(std::move(buffer));
    return static_cast<int>(buffers_.size()) - 1;
}

bool Program::fits_quantised(int buffer, int width) const {
    const Buffer& b = buffers_.at(static_cast<size_t>(buffer));
    return b.quantised && b.width == width && width % kGroup == 0;
}

void Program::note_reader(int buffer, WeightKind kind) {
    Buffer& b = buffers_[static_cast<size_t>(buffer)];
    (is_integer(kind) ? b.for_integer : b.for_bf16) = true;
    if (has_halves(kind)) b.for_halves = true;
}

Phase& Program::phase_for(Section section, Phase::Kind kind, Domain domain) {
    std::vector<Phase>& phases = sections_[static_cast<int>(section)];
    const bool joins =
        kind == Phase::Kind::kRows && !phases.empty() && phases.back().kind == kind && phases.back().domain == domain;
    if (!joins) phases.push_back(Phase{kind, domain, {}, {}, {}});
    return phases.back();
}

void Program::add_row_op(Section section, Domain domain, const RowOp& op) {
    for (const int id : {op.a, op.b, op.out})
        if (id >= static_cast<int>(buffers_.size())) throw std::out_of_range("no such buffer");
    if (op.kind == RowOpKind::kRope && (op.rotation < 0 || op.rotation >= static_cast<int>(rotations_.size())))
        throw std::out_of_range("no such rotation");
    if (op.kind == RowOpKind::kScaleByPosition && (op.count < 1 || op.shift < 0))
        throw std::invalid_argument("a step of positions has " + std::to_string(op.count) + " of them, shifted by " +
                                    std::to_string(op.shift));
    if (op.kind == RowOpKind::kWriteKv) num_layers_ = std::max(num_layers_, op.count + 1);
    phase_for(section, Phase::Kind::kRows, domain).ops.push_back(op);
}

void Program::add_linear(Section section, Domain domain, std::vector<LinearPart> parts) {
    for (const LinearPart& part : parts) {
        const Buffer& in = buffers_.at(static_cast<size_t>(part.in));
        const Buffer& out = buffers_.at(static_cast<size_t>(part.out < 0 ? part.quantised_out : part.out));
        if (in.width != part.w->cols || in.quantised != reads_quantised(part.w->kind, activations_) ||
            out.width != part.w->rows || out.quantised != (part.out < 0))
            throw std::invalid_argument("a linear layer of " + std::to_string(part.w->rows) + " x " +
                                        std::to_string(part.w->cols) + " does not fit its buffers");
        if (part.quantised_out >= 0 && (!part.up || !fits_quantised(part.quantised_out, part.w->rows)))
            throw std::invalid_argument("only gated products of whole groups of 32 columns quantise their result");
        if (part.up &&
            (part.up->rows != part.w->rows || part.up->cols != part.w->cols || part.up->kind != part.w->kind))
            throw std::invalid_argument("gate and up of one gated product must have one shape and packing");
        if (in.quantised) note_reader(part.in, part.w->kind);
    }
    phase_for(section, Phase::Kind::kLinear, domain).parts = std::move(parts);
}

void Program::add_attention(const AttentionSpec& spec) {
    if (spec.layer < 0) throw std::invalid_argument("a layer is negative");
    if (spec.quantised_out >= 0 && (shape_.num_heads / shape_.num_kv_heads * shape_.head_dim % kGroup ||
                                    !fits_quantised(spec.quantised_out, shape_.num_heads * shape_.head_dim)))
        throw std::invalid_argument("attention can only quantise whole groups of 32 columns per KV head");
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
            allocate_quantised(b, activations_);
        } else if (static_cast<int>(i) != rows) {
            b.floats.stride = static_cast<size_t>(round_up(b.width, kPanel));
            b.pages = PageBuffer(n * b.floats.stride * sizeof(float));
            b.floats.data = b.pages.as<float>();
        }
    }
    const size_t linear_bytes = 2 * sizeof(float) * kMaxLinearRows * kGatedPanels * kPanel;
    const int group = shape_.num_heads / shape_.num_kv_heads;
    size_t attention_bytes = AttentionScratch::bytes(group, shape_.head_dim, false);  // for a float32 cache
    if (activations_ != Activations::kInt8)
        attention_bytes = std::max(attention_bytes, AttentionScratch::bytes(group, shape_.head_dim, true));
    for (int t = 0; t < pool_.size(); ++t) scratch_.emplace_back(std::max(linear_bytes, attention_bytes));
    size_t k_tiles = 0;
    for (const Buffer& b : buffers_) k_tiles = std::max(k_tiles, b.quants.k_tiles);
    for (int t = 0; kernels_.to_columns && t < pool_.size(); ++t)
        columns_.emplace_back(k_tiles * kMaxColumns * kGroup * sizeof(uint16_t));
    for (Rotation& r : rotations_)
        r.pages = PageBuffer(static_cast<size_t>(max_tokens) * 2 * static_cast<size_t>(r.half()) * sizeof(float));
}

size_t Program::scratch_bytes() const {
    size_t bytes = 0;
    for (const Rotation& r : rotations_) bytes += r.pages.bytes();
    for (const Buffer& b : buffers_) bytes += b.pages.bytes();
    for (const auto* pages : {&scratch_, &columns_})
        for (const PageBuffer& p : *pages) bytes += p.bytes();
    return bytes;
}

std::span<const float> Program::hidden_row(int row) const {
    const Floats hidden = floats(hidden_, row + 1);
    return {hidden.data + static_cast<size_t>(row) * hidden.stride, static_cast<size_t>(width(hidden_))};
}

Floats Program::floats(int buffer, int rows) const {
    const Buffer& b = buffers_.at(static_cast<size_t>(buffer));
    if (b.quantised || rows < 0 || rows > b.max_rows) throw std::out_of_range("no such rows of floats");
    return b.floats;
}

}  // namespace octavo
