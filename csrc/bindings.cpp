// octavo._native: what src/octavo/kernels/native/ sees. Checks what Python hands over; the kernels check nothing.
#if !defined(_WIN32)
#include <unistd.h>
#endif

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <optional>
#include <tuple>

#include "cpu_features.h"
#include "kv_cache.h"
#include "measure.h"
#include "packing.h"
#include "program.h"
#include "sampling.h"
#include "thread_pool.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace octavo {
namespace {

using Reals = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Bytes = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Sizes = std::tuple<size_t, size_t, size_t, size_t, size_t>;

template <class Array>
auto view(const Array& array) {
    return std::span(array.data(), array.size());
}

// What run() reads of a Python array while it lives: C-contiguous, of one type. A third of the cost of an nb::ndarray,
// and a step of a small model takes over a dozen.
template <class T>
class Buffer {
  public:
    // formats: what the struct module calls T
    Buffer(nb::handle object, const char* formats) {
        if (PyObject_GetBuffer(object.ptr(), &view_, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT)) nb::raise_python_error();
        if (view_.itemsize == sizeof(T) && std::strlen(view_.format) == 1 && std::strchr(formats, *view_.format))
            return;
        const std::string found = view_.format;
        PyBuffer_Release(&view_);
        throw std::invalid_argument("an array of run() has items of type '" + found + "' but must have '" + formats +
                                    "'");
    }
    ~Buffer() { PyBuffer_Release(&view_); }
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;

    std::span<const T> span() const {
        return {static_cast<const T*>(view_.buf), static_cast<size_t>(view_.len) / sizeof(T)};
    }

  private:
    Py_buffer view_;
};

struct Ints32 : Buffer<int32_t> {
    explicit Ints32(nb::handle object) : Buffer(object, "il") {}
};

// A new numpy array [rows, cols] that owns its floats.
nb::ndarray<nb::numpy, float, nb::ndim<2>> new_array(size_t rows, size_t cols, float** data) {
    *data = new float[std::max<size_t>(rows * cols, 1)];
    nb::capsule owner(*data, [](void* p) noexcept { delete[] static_cast<float*>(p); });
    return {*data, {rows, cols}, owner};
}

// Threads, kernels and the arithmetic of quantised weights: made once per backend.
struct Context {
    Context(int threads, const std::string& isa, const std::string& numerics)
        : kernels(select_kernels(isa)), activations(choose(kernels, numerics)), pool(checked(threads)) {}
    // "fast" differs from "exact" only where products in bfloat16 are the ISA's own.
    static Activations choose(const Kernels& kernels, const std::string& numerics) {
        if (numerics == "int8") return Activations::kInt8;
        if (numerics == "bf16") return Activations::kBf16;
        if (numerics == "by rows" || (numerics == "fast" && kernels.exact == Activations::kBf16))
            return Activations::kByRows;
        if (numerics == "exact" || numerics == "fast") return kernels.exact;
        throw std::invalid_argument("numerics is '" + numerics + "' but must be exact, fast, int8, bf16 or by rows");
    }
    static int checked(int threads) {
        if (threads < 1 || threads > 1024)
            throw std::invalid_argument("threads is " + std::to_string(threads) + " but must be from 1 to 1024");
        return threads;
    }
    const Kernels& kernels;
    const Activations activations;
    ThreadPool pool;
};

// A vector of float32 (norm, bias), padded with zeros to whole registers.
struct Vector {
    explicit Vector(Reals values) : size(values.size()), pages((size + kPanel) * sizeof(float)) {
        std::copy(values.data(), values.data() + size, pages.as<float>());
    }
    size_t size;
    PageBuffer pages;
};

std::shared_ptr<PackedMatrix> pack(Context& context, const std::string& encoding, int64_t rows, int64_t cols,
                                   Bytes bytes) {
    nb::gil_scoped_release release;
    return pack_matrix(encoding, rows, cols, view(bytes), context.pool);
}

nb::ndarray<nb::numpy, float, nb::ndim<2>> unpack(const PackedMatrix& m, Context& context) {
    float* out;
    auto array = new_array(static_cast<size_t>(m.view.rows), static_cast<size_t>(m.view.cols), &out);
    for (int row = 0; row < m.view.rows; ++row)
        context.kernels.dequantise_row(m.view, row, out + static_cast<size_t>(row) * m.view.cols);
    return array;
}

// A program with what it needs kept alive.
class BoundProgram {
  public:
    BoundProgram(std::shared_ptr<Context> context, int vocab_size, int num_heads, int num_kv_heads, int head_dim)
        : context_(std::move(context)),
          program_(context_->kernels, context_->activations, context_->pool,
                   {vocab_size, num_heads, num_kv_heads, head_dim}),
          sampler_(context_->kernels, vocab_size, context_->pool.size()) {}

    BoundProgram(const BoundProgram&) = delete;
    BoundProgram& operator=(const BoundProgram&) = delete;

    Program& program() { return program_; }
    size_t scratch_bytes() const { return program_.scratch_bytes() + sampler_.scratch_bytes(); }
    const float* vector(const std::shared_ptr<Vector>& v, int width) {
        if (v->size != static_cast<size_t>(width))
            throw std::invalid_argument("a vector has " + std::to_string(v->size) + " values but must have " +
                                        std::to_string(width));
        vectors_.push_back(v);
        return v->pages.as<float>();
    }
    const Matrix* matrix(const std::shared_ptr<PackedMatrix>& m) {
        program_.keep(m);
        return &m->view;
    }
    // ints, sizes: those of a Step. lists: bias ids, allowed, forbidden, history, breakers (int32) and bias values
    // (float32), or nothing at all. targets: None for none. notify_fd gets a byte once the GIL is released.
    // num_hidden: so many logit rows, after those of draws and targets, run up to the hidden row only. masks: None, or
    // those of a DrawMasks: (rows, bits, latch); another thread writes the bits, then opens the latch, which it must.
    // Returns (results, seconds of the forward pass, of the draws, of waiting for the GIL afterwards).
    nb::tuple run(const KvCache& kv, nb::handle ints_object, const Sizes& sizes, nb::handle draws, nb::list lists,
                  nb::handle targets, int notify_fd, size_t num_hidden, nb::handle masks);
    // [rows, hidden] of the last step: those of its logit rows whose indices these are.
    nb::ndarray<nb::numpy, float, nb::ndim<2>> hidden(const std::vector<int>& rows) const;

  private:
    std::shared_ptr<Context> context_;
    Program program_;
    Sampler sampler_;
    std::vector<std::shared_ptr<Vector>> vectors_;
};

void notify(int fd) {
#if !defined(_WIN32)
    const char byte = 0;
    if (fd >= 0 && write(fd, &byte, 1) < 0) return;  // full: whoever reads has been told already
#endif
}

double seconds_between(std::chrono::steady_clock::time_point from, std::chrono::steady_clock::time_point to) {
    return std::chrono::duration<double>(to - from).count();
}

nb::list results_to_python(const std::vector<RowResult>& results) {
    nb::list rows;
    for (const RowResult& r : results) {
        if (r.token < 0 || !r.has_logprob) {
            rows.append(r.token);
            continue;
        }
        nb::list top;
        for (const auto& [id, logprob] : r.top) top.append(nb::make_tuple(id, logprob));
        rows.append(nb::make_tuple(r.token, r.logprob, nb::tuple(top)));
    }
    return rows;
}

nb::tuple BoundProgram::run(const KvCache& kv, nb::handle ints_object, const Sizes& sizes, nb::handle draws,
                            nb::list lists, nb::handle targets, int notify_fd, size_t num_hidden, nb::handle masks) {
    if (lists.size() != 0 && lists.size() != 6) throw std::invalid_argument("run takes 6 lists or none");
    const Ints32 step_ints(ints_object);
    const auto [num_tokens, num_rows, num_seqs, num_copies, num_groups] = sizes;
    const Step step(step_ints.span(), num_tokens, num_rows, num_seqs, num_copies, num_groups);
    const Buffer<uint8_t> records(draws, "B");
    std::optional<Ints32> ints[5], wanted_buffer, mask_rows;
    std::optional<Buffer<float>> bias_values;
    std::optional<Buffer<uint32_t>> bits;
    DrawMasks draw_masks;
    if (!masks.is_none()) {
        const auto parts = nb::cast<nb::tuple>(masks);
        mask_rows.emplace(parts[0]);
        bits.emplace(parts[1], "IL");
        draw_masks = {mask_rows->span(), bits->span(), nb::cast<const Latch*>(parts[2])};
    }
    DrawLists draw_lists{};
    if (lists.size() != 0) {
        for (size_t i = 0; i < 5; ++i) ints[i].emplace(lists[i]);
        bias_values.emplace(lists[5], "f");
        draw_lists = {ints[0]->span(), bias_values->span(), ints[1]->span(),
                      ints[2]->span(), ints[3]->span(),     ints[4]->span()};
    }
    if (!targets.is_none()) wanted_buffer.emplace(targets);
    const std::span<const int32_t> pairs = wanted_buffer ? wanted_buffer->span() : std::span<const int32_t>();
    if (records.span().size() % sizeof(DrawParams) || pairs.size() % 2 ||
        reinterpret_cast<uintptr_t>(records.span().data()) % alignof(DrawParams))
        throw std::invalid_argument("draws or targets are not whole, aligned records");
    const std::span params(reinterpret_cast<const DrawParams*>(records.span().data()),
                           records.span().size() / sizeof(DrawParams));
    const std::span wanted(reinterpret_cast<const Target*>(pairs.data()), pairs.size() / 2);
    const size_t num_logits = params.size() + wanted.size();
    if (num_hidden > step.logit_rows.size() || num_logits != step.logit_rows.size() - num_hidden)
        throw std::invalid_argument("there are " + std::to_string(step.logit_rows.size()) + " logit_rows but " +
                                    std::to_string(params.size()) + " draws, " + std::to_string(wanted.size()) +
                                    " targets and " + std::to_string(num_hidden) + " hidden rows alone");
    double sample_s;
    const auto began = std::chrono::steady_clock::now();
    std::chrono::steady_clock::time_point done;
    {
        nb::gil_scoped_release release;
        notify(notify_fd);
        sampler_.begin(step, params, draw_lists, wanted, draw_masks);
        sample_s = program_.run(step, kv, sampler_, static_cast<int>(num_logits));
        done = std::chrono::steady_clock::now();
    }
    const double gil_wait_s = seconds_between(done, std::chrono::steady_clock::now());
    // All that is not Python's counts as the forward pass, so checking the step and waking the threads too.
    const double forward_s = seconds_between(began, done) - sample_s;
    return nb::make_tuple(results_to_python(sampler_.results()), forward_s, sample_s, gil_wait_s);
}

nb::ndarray<nb::numpy, float, nb::ndim<2>> BoundProgram::hidden(const std::vector<int>& rows) const {
    if (rows.empty()) throw std::invalid_argument("hidden takes at least one row");
    float* out;
    const size_t width = program_.hidden_row(0).size();
    auto array = new_array(rows.size(), width, &out);
    for (const int row : rows) {
        if (row < 0) throw std::out_of_range("a hidden row is negative");
        out = std::ranges::copy(program_.hidden_row(row), out).out;
    }
    return array;
}

// The pool has one caller at a time: measure while no step runs.
void bind_measure(nb::module_& m) {
    m.def(
        "read_bandwidths",
        [](Context& c, const std::vector<size_t>& sizes, double seconds) {
            for (const size_t size : sizes)
                if (size < size_t{1} << 20)
                    throw std::invalid_argument("a size is " + std::to_string(size) +
                                                " bytes but must be at least 1 MiB");
            nb::gil_scoped_release release;
            return read_bandwidths(c.pool, sizes, seconds);
        },
        "context"_a, "sizes"_a, "seconds"_a,
        "Bytes per second of all threads reading working sets of these sizes, each for `seconds`.");
    m.def(
        "multiply_add_rates",
        [](Context& c, double seconds) {
            nb::gil_scoped_release release;
            return multiply_add_rates(c.pool, c.kernels.name, seconds);
        },
        "context"_a, "seconds"_a,
        "(kind of arithmetic, multiply-adds per second of all threads), each measured for `seconds`.");
}

using P = BoundProgram;
using M = std::shared_ptr<PackedMatrix>;
using V = std::shared_ptr<Vector>;
using ProgramClass = nb::class_<P>;

// An op that treats each row alone; what it does not use keeps its default.
void bind_row_op(nb::module_& m, ProgramClass& program) {
    nb::enum_<RowOpKind>(m, "RowOp")
        .value("EMBEDDING", RowOpKind::kEmbedding)
        .value("RMS_NORM", RowOpKind::kRmsNorm)
        .value("LAYER_NORM", RowOpKind::kLayerNorm)
        .value("QUANTISE", RowOpKind::kQuantise)
        .value("ROPE", RowOpKind::kRope)
        .value("WRITE_KV", RowOpKind::kWriteKv)
        .value("GATED_MUL", RowOpKind::kGatedMul)
        .value("ACTIVATION", RowOpKind::kActivation)
        .value("ADD", RowOpKind::kAdd)
        .value("SCALE", RowOpKind::kScale)
        .value("SCALE_BY_POSITION", RowOpKind::kScaleByPosition)
        .value("SELECT_ROWS", RowOpKind::kSelectRows)
        .value("SOFT_CAP", RowOpKind::kSoftCap);
    program.def(
        "row_op",
        [](P& p, RowOpKind kind, Section s, Domain d, int a, int b, int out, float value, int count, Gate gate,
           V weight, V bias, M table, int rotation, int shift) {
            const int heads = kind == RowOpKind::kRmsNorm ? count : 1;
            if (heads < 1 || (a >= 0 && p.program().width(a) % heads))
                throw std::invalid_argument("a row does not consist of " + std::to_string(heads) + " heads");
            p.program().add_row_op(s, d,
                                   {.kind = kind,
                                    .a = a,
                                    .b = b,
                                    .out = out,
                                    .weight = weight ? p.vector(weight, p.program().width(a) / heads) : nullptr,
                                    .bias = bias ? p.vector(bias, p.program().width(a)) : nullptr,
                                    .table = table ? p.matrix(table) : nullptr,
                                    .value = value,
                                    .count = count,
                                    .rotation = rotation,
                                    .shift = shift,
                                    .gate = gate});
        },
        "kind"_a, "section"_a, "domain"_a, "a"_a = -1, "b"_a = -1, "out"_a = -1, "value"_a = 0.0f, "count"_a = 0,
        "gate"_a = Gate::kSilu, "weight"_a.none() = nb::none(), "bias"_a.none() = nb::none(),
        "table"_a.none() = nb::none(), "rotation"_a = 0, "shift"_a = 0);
}

// Ops that are a phase of their own.
void bind_phases(ProgramClass& program) {
    program
        .def(
            "linear",
            [](P& p, Section s, Domain d, const std::vector<nb::dict>& parts) {
                std::vector<LinearPart> list;
                for (const nb::dict& part : parts) {
                    LinearPart l;
                    l.w = p.matrix(nb::cast<M>(part["weight"]));
                    l.in = nb::cast<int>(part["x"]);
                    l.out = nb::cast<int>(part["out"]);
                    if (part.contains("up")) l.up = p.matrix(nb::cast<M>(part["up"]));
                    if (part.contains("gate")) l.gate = nb::cast<Gate>(part["gate"]);
                    if (part.contains("bias")) l.bias = p.vector(nb::cast<V>(part["bias"]), l.w->rows);
                    if (part.contains("residual")) l.residual = nb::cast<int>(part["residual"]);
                    if (part.contains("quantised_out")) l.quantised_out = nb::cast<int>(part["quantised_out"]);
                    list.push_back(l);
                }
                p.program().add_linear(s, d, std::move(list));
            },
            "section"_a, "domain"_a, "parts"_a)
        .def(
            "attention",
            [](P& p, int layer, int q, int out, float scale, int window, float soft_cap, int quantised_out) {
                p.program().add_attention({layer, q, out, scale, soft_cap, window, quantised_out});
            },
            "layer"_a, "q"_a, "out"_a, "scale"_a, "window"_a, "soft_cap"_a, "quantised_out"_a = -1);
}

void bind_program(nb::module_& m) {
    nb::enum_<Domain>(m, "Domain").value("TOKENS", Domain::kTokens).value("ROWS", Domain::kRows);
    nb::enum_<Section>(m, "Section").value("BODY", Section::kBody).value("HEAD", Section::kHead);
    nb::enum_<Gate>(m, "Gate").value("SILU", Gate::kSilu).value("GELU", Gate::kGelu).value("GELU_ERF", Gate::kGeluErf);
    ProgramClass program(m, "Program",
                         "A model's ops, recorded once, replayed with one call per step (csrc/program.h).");
    program
        .def(nb::init<std::shared_ptr<Context>, int, int, int, int>(), "context"_a, "vocab_size"_a, "num_heads"_a,
             "num_kv_heads"_a, "head_dim"_a)
        .def(
            "rotation",
            [](P& p, std::vector<double> frequencies, double factor) {
                return p.program().add_rotation(std::move(frequencies), factor);
            },
            "frequencies"_a, "factor"_a)
        .def(
            "buffer",
            [](P& p, Domain d, int width, bool quantised) { return p.program().add_buffer(d, width, quantised); },
            "domain"_a, "width"_a, "quantised"_a = false)
        .def(
            "finish",
            [](P& p, int hidden, int rows, int logits, int max_tokens, int max_seqs) {
                p.program().finish(hidden, rows, logits, max_tokens, max_seqs);
            },
            "hidden"_a, "rows"_a, "logits"_a, "max_tokens"_a, "max_seqs"_a)
        .def_prop_ro("scratch_bytes", &P::scratch_bytes)
        .def(
            "read",
            [](P& p, int buffer, int rows) {
                const Floats f = p.program().floats(buffer, rows);
                const auto width = static_cast<size_t>(p.program().width(buffer));
                float* out;
                auto array = new_array(static_cast<size_t>(rows), width, &out);
                for (int r = 0; r < rows; ++r)
                    std::copy_n(f.data + static_cast<size_t>(r) * f.stride, width,
                                out + static_cast<size_t>(r) * width);
                return array;
            },
            "buffer"_a, "rows"_a, "The first rows of a float buffer, as the last step left them.")
        .def("hidden", &P::hidden, "rows"_a)
        .def("run", &P::run, "kv"_a, "ints"_a, "sizes"_a, "draws"_a, "lists"_a, "targets"_a.none(), "notify_fd"_a,
             "num_hidden"_a = 0, "masks"_a.none() = nb::none());
    bind_row_op(m, program);
    bind_phases(program);
}

}  // namespace
}  // namespace octavo

NB_MODULE(_native, m) {
    using namespace octavo;
    m.doc() = "octavo's CPU kernels: packed weights, paged KV cache, recorded programs, sampling.";
    m.def(
        "step_layout",
        [](nb::handle ints_object, const Sizes& sizes) {
            const Ints32 ints(ints_object);
            const auto [num_tokens, num_rows, num_seqs, num_copies, num_groups] = sizes;
            const Step step(ints.span(), num_tokens, num_rows, num_seqs, num_copies, num_groups);
            std::vector<std::pair<std::string, size_t>> parts;
            const std::pair<const char*, std::span<const int32_t>> taken[] = {{"token_ids", step.token_ids},
                                                                              {"positions", step.positions},
                                                                              {"slot_mapping", step.slot_mapping},
                                                                              {"logit_rows", step.logit_rows},
                                                                              {"query_starts", step.query_starts},
                                                                              {"context_lens", step.context_lens},
                                                                              {"copies", step.copies},
                                                                              {"block_tables", step.block_tables}};
            size_t start = 0;
            for (const auto& [name, part] : taken) {
                if (part.data() != ints.span().data() + start) throw std::logic_error("a part is out of order");
                parts.emplace_back(name, part.size());
                start += part.size();
            }
            return parts;
        },
        "ints"_a, "sizes"_a, "The parts of a step as C++ takes them: names and lengths, one after the other.");
    m.def("available_isas", &available_isas, "Kernel tables that this CPU can run, best last.");
    m.attr("DRAW_BYTES") = sizeof(DrawParams);
    nb::class_<Latch>(m, "Latch", "Opened by the thread that has filled a step's masks.")
        .def(nb::init<>())
        .def("open", &Latch::open);
    nb::class_<Context>(m, "Context", "Compute threads and the kernel table of one ISA.")
        .def(nb::init<int, const std::string&, const std::string&>(), "threads"_a, "isa"_a = "", "numerics"_a = "exact")
        .def_prop_ro("isa", [](const Context& c) { return c.kernels.name; })
        .def_prop_ro("threads", [](const Context& c) { return c.pool.size(); });
    nb::class_<PackedMatrix>(m, "PackedMatrix", "A weight matrix in the kernels' layout.")
        .def_prop_ro("shape", [](const PackedMatrix& p) { return std::pair(p.view.rows, p.view.cols); })
        .def(
            "reads_quantised",
            [](const PackedMatrix& p, const Context& c) { return reads_quantised(p.view.kind, c.activations); },
            "context"_a, "Whether products with it read rounded activations.")
        .def_prop_ro("kind", [](const PackedMatrix& p) { return static_cast<int>(p.view.kind); })
        .def_prop_ro("num_bytes", [](const PackedMatrix& p) { return p.storage.bytes(); })
        .def(
            "fill",
            [](PackedMatrix& p, Context& c, int64_t first_row, Bytes bytes) {
                nb::gil_scoped_release release;
                fill_rows(p, first_row, view(bytes), c.pool);
            },
            "context"_a, "first_row"_a, "data"_a, "Pack rows from first_row on, once each.")
        .def("unpack", &unpack, "context"_a);
    nb::class_<Vector>(m, "Vector", "Norm weights or a bias, float32.")
        .def(nb::init<Reals>(), "values"_a)
        .def_prop_ro("size", [](const Vector& v) { return v.size; });
    m.def("pack", &pack, "context"_a, "encoding"_a, "rows"_a, "cols"_a, "data"_a);
    m.def("allocate", &allocate_matrix, "encoding"_a, "rows"_a, "cols"_a, "A matrix to be filled.");
    m.def("packed_size", &packed_size, "encoding"_a, "rows"_a, "cols"_a, "Bytes of a packed matrix.");
    nb::enum_<KvKind>(m, "KvKind").value("F32", KvKind::kF32).value("BF16", KvKind::kBf16);
    m.def(
        "kv_token_bytes",
        [](KvKind kind, int layers, int kv_heads, int head_dim) {
            return KvShape{1, kv_heads, head_dim, kind}.layer_bytes() * static_cast<size_t>(layers);
        },
        "kind"_a, "num_layers"_a, "num_kv_heads"_a, "head_dim"_a, "Bytes of K and V of one position.");
    nb::class_<KvCache>(m, "KvCache", "The paged KV cache of all layers.")
        .def(
            "__init__",
            [](KvCache* self, KvKind kind, const std::vector<std::tuple<std::vector<int>, int, int>>& groups,
               int block_size, int kv_heads, int head_dim) {
                if (groups.empty() || block_size < 1 || kv_heads < 1 || head_dim < 1)
                    throw std::invalid_argument("every size of a KV cache must be positive");
                std::vector<KvGroup> made;
                for (const auto& [layers, blocks, window] : groups) made.push_back({layers, blocks, window});
                new (self) KvCache(KvShape{block_size, kv_heads, head_dim, kind}, std::move(made));
            },
            "kind"_a, "groups"_a, "block_size"_a, "num_kv_heads"_a, "head_dim"_a)
        .def_prop_ro("num_bytes", &KvCache::bytes)
        .def(
            "poison",
            [](const KvCache& kv, int block, int group) {
                if (group < 0 || group >= kv.num_groups() || block < 0 || block >= kv.group(group).num_blocks)
                    throw std::invalid_argument("no such block");
                std::memset(kv.block(group, block), 0xFF, kv.block_bytes(group));
            },
            "block"_a, "group"_a = 0, "Fill a block with NaN, to prove that nothing reads what it should not.");
    bind_program(m);
    bind_measure(m);
}
