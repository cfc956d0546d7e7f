// A model's ops, recorded once, replayed each step with one call.
//
// A program has two sections, body (up to the hidden rows) and head (hidden rows to logits, run in slices). A section
// is a list of phases, each of which waits for the one before. A phase is either
//   rows       ops that treat each row alone: a thread takes a few rows through all of them
//   linear     one or more products, split over panels of columns and blocks of rows
//   attention  split over sequences, KV heads and blocks of queries
// Nothing is ever split over K, so a row's result does not depend on threads or on the rows beside it.
#pragma once

#include <algorithm>
#include <memory>
#include <span>
#include <vector>

#include "kv_cache.h"
#include "memory.h"
#include "ops/types.h"
#include "packing.h"
#include "step.h"
#include "thread_pool.h"

namespace octavo {

constexpr int kFewRows = 8;      // up to so many, Activations::kByRows takes int8: their sums outweigh no dequantising
constexpr int kGatedPanels = 2;  // panels of one gated item: a whole group of 32 columns, so that it can be quantised

enum class Domain : int { kTokens, kRows };  // how many rows a buffer has: T of the step, or a slice of its logit rows
enum class Section : int { kBody, kHead };

struct Buffer {
    Domain domain;
    int width;
    bool quantised;
    // a quantised buffer's readers: weights of which kinds; for_halves: some of the integers have a scale per 16
    bool for_integer = false, for_bf16 = false, for_halves = false;
    int max_rows = 0;
    PageBuffer pages;
    Floats floats{};
    Quantised quants{};
};

enum class RowOpKind {
    kEmbedding,
    kRmsNorm,
    kLayerNorm,
    kQuantise,
    kRope,
    kWriteKv,
    kGatedMul,
    kActivation,
    kAdd,
    kScale,
    kScaleByPosition,
    kSelectRows,
    kSoftCap
};

struct RowOp {
    RowOpKind kind;
    int a = -1, b = -1;  // buffers read
    int out = -1;        // buffer written
    const float* weight = nullptr;
    const float* bias = nullptr;
    const Matrix* table = nullptr;
    float value = 0.0f;  // eps, factor, cap or beta
    int count = 0;       // heads, the layer, or the positions of a step of kScaleByPosition
    int rotation = 0;    // which of the program's, for kRope
    int shift = 0;       // of positions, for kScaleByPosition
    Gate gate = Gate::kSilu;
};

struct LinearPart {
    const Matrix* w = nullptr;
    const Matrix* up = nullptr;  // with a gate: out = act(x w) * (x up)
    const float* bias = nullptr;
    int in = -1, residual = -1, out = -1;  // residual: added to the product; out may be -1 if there is a quantised_out
    Gate gate = Gate::kSilu;
    int quantised_out = -1;  // also quantise the result, which must be whole groups of 32 columns
};

struct AttentionSpec {
    int layer = 0, q = -1, out = -1;
    float scale = 1.0f, soft_cap = 0.0f;
    int window = 0;          // 0: none
    int quantised_out = -1;  // also quantise the result
};

struct Phase {
    enum class Kind { kRows, kLinear, kAttention } kind;
    Domain domain;
    std::vector<RowOp> ops;
    std::vector<LinearPart> parts;
    AttentionSpec attention;
};

struct ModelShape {
    int vocab_size, num_heads, num_kv_heads, head_dim;
};

// How some layers rotate: pairs of the leading `dim` dimensions of a head.
struct Rotation {
    int dim;
    std::vector<double> frequencies;  // [dim / 2] radians per position
    double factor;                    // cos and sin are multiplied by it
    PageBuffer pages;                 // cos and sin of each of the step's tokens, [T][2][half()]

    int half() const { return std::max((dim / 2 + kPanel - 1) / kPanel, 1) * kPanel; }
    float* row(int token) const { return pages.as<float>() + static_cast<size_t>(token) * 2 * half(); }
};

// Called inside the step for each row of logits, on any thread.
struct LogitsConsumer {
    virtual void consume(const float* logits, int row, int thread) = 0;

  protected:
    ~LogitsConsumer() = default;
};

class Program {
  public:
    static constexpr int kSliceRows = 64;  // logit rows at a time, so that [prompt, vocab] never exists

    Program(const Kernels& kernels, Activations activations, ThreadPool& pool, const ModelShape& shape);

    int add_rotation(std::vector<double> frequencies, double factor);
    int add_buffer(Domain domain, int width, bool quantised);
    void add_row_op(Section section, Domain domain, const RowOp& op);  // joins the phase before, if that is of rows too
    void add_linear(Section section, Domain domain, std::vector<LinearPart> parts);
    void add_attention(const AttentionSpec& spec);
    void keep(std::shared_ptr<PackedMatrix> weight) { weights_.push_back(std::move(weight)); }
    // hidden: buffer of the body's result; rows: where the head reads a slice of it; logits: the head's result.
    void finish(int hidden, int rows, int logits, int max_tokens, int max_seqs);

    // Memory of the buffers, most of which no step has touched before the first long prompt.
    size_t scratch_bytes() const;
    const ModelShape& shape() const { return shape_; }
    int width(int buffer) const { return buffers_.at(static_cast<size_t>(buffer)).width; }
    // A float buffer of at least `rows` rows; throws std::out_of_range.
    Floats floats(int buffer, int rows) const;
    // Row `row` of the last step's hidden rows: [width of the body's result].
    std::span<const float> hidden_row(int row) const;
    // Checks and runs a step. num_logits: of the first so many of its rows the consumer gets logits. Seconds that the
    // draws took of it.
    double run(const Step& step, const KvCache& kv, LogitsConsumer& consumer, int num_logits);

  private:
    struct Run;  // program_run.cpp

    bool fits_quantised(int buffer, int width) const;
    void note_reader(int buffer, WeightKind kind);
    bool few(int rows) const { return activations_ == Activations::kByRows && rows <= kFewRows; }
    Phase& phase_for(Section section, Phase::Kind kind, Domain domain);

    const Kernels& kernels_;
    const Activations activations_;
    ThreadPool& pool_;
    ModelShape shape_;
    std::vector<Rotation> rotations_;
    std::vector<std::shared_ptr<PackedMatrix>> weights_;
    std::vector<Buffer> buffers_;
    std::vector<Phase> sections_[2];
    std::vector<PageBuffer> scratch_;  // per thread
    std::vector<PageBuffer> columns_;  // per thread: LinearTask::columns
    int hidden_ = -1, rows_ = -1, logits_ = -1;
    int max_tokens_ = 0, max_seqs_ = 0, num_layers_ = 0;
};

}  // namespace octavo
