#include "packing.h"

#include <atomic>
#include <climits>
#include <cstring>
#include <stdexcept>

#include "ops/int_layout.h"
#include "packing_formats.h"

namespace octavo {

namespace {

struct Encoding {
    const char* name;
    WeightKind kind;
    int weights;                     // per block of the file
    int bytes;                       // per block of the file
    int block_bytes;                 // per panel and block, packed
    TakeApart take_apart = nullptr;  // null: the file's bytes are only put in another order
};

constexpr int packed_bytes(WeightKind kind, int weights) {
    const IntLayout l = int_layout(kind);
    return header_bytes(l) + weights / kGroup * group_bytes(l);
}
constexpr Encoding blocks(const char* name, WeightKind kind, int weights, int bytes, TakeApart take_apart) {
    return {name, kind, weights, bytes, packed_bytes(kind, weights), take_apart};
}

constexpr Encoding kEncodings[] = {
    {"F32", WeightKind::kF32, 1, 4, 4 * kPanel},
    {"F16", WeightKind::kF16, 1, 2, 2 * kPanel},
    {"BF16", WeightKind::kBf16, 1, 2, 2 * kPanel},
    {"Q8_0", WeightKind::kInt8, 32, 34, 34 * kPanel},
    {"Q4_0", WeightKind::kInt4Z, 32, 18, 18 * kPanel},
    {"Q4_1", WeightKind::kInt4, 32, 20, 20 * kPanel},
    blocks("Q5_0", WeightKind::kInt5Z, 32, 22, take_q5_0),
    blocks("Q5_1", WeightKind::kInt5, 32, 24, take_q5_1),
    blocks("Q2_K", WeightKind::kInt2K, 256, 84, take_q2_k),
    blocks("Q3_K", WeightKind::kInt3K, 256, 110, take_q3_k),
    blocks("Q4_K", WeightKind::kInt4K, 256, 144, take_q4_k),
    blocks("Q5_K", WeightKind::kInt5K, 256, 176, take_q5_k),
    blocks("Q6_K", WeightKind::kInt6K, 256, 210, take_q6_k),
    blocks("I8_K", WeightKind::kInt8K, 256, 274, take_i8_k),
    blocks("IQ4_NL", WeightKind::kCode4, 32, 18, take_iq4_nl),
    blocks("IQ4_XS", WeightKind::kCode4K, 256, 136, take_iq4_xs),
};

const Encoding& find_encoding(const std::string& name) {
    for (const Encoding& e : kEncodings)
        if (name == e.name) return e;
    throw std::invalid_argument("weight encoding " + name + " has no native kernels");
}

// Block g of one column into its lane of the packed panel.
void pack_block(const Encoding& e, const uint8_t* in, uint8_t* panel, int g, int lane) {
    if (e.kind == WeightKind::kBf16) {
        std::memcpy(panel + (static_cast<size_t>(g / 2) * kPanel + lane) * 4 + g % 2 * 2, in, 2);
        return;
    }
    uint8_t* out = panel + static_cast<size_t>(g) * e.block_bytes;
    if (e.take_apart) {
        const IntLayout layout = int_layout(e.kind);
        GroupValues values{};
        for (int i = 0; i < e.weights / kGroup; ++i) {
            e.take_apart(in, i, values);
            put_group(e.kind, values, i == 0, lane, out, out + group_offset(layout, static_cast<size_t>(i)));
        }
        return;
    }
    if (e.weights == 1) {
        std::memcpy(out + lane * e.bytes, in, static_cast<size_t>(e.bytes));
        return;
    }
    std::memcpy(out + 2 * lane, in, 2);
    out += 2 * kPanel;
    in += 2;
    if (e.kind == WeightKind::kInt4) {
        std::memcpy(out + 2 * lane, in, 2);
        out += 2 * kPanel;
        in += 2;
    }
    const int bytes = e.kind == WeightKind::kInt8 ? kGroup : kGroup / 2;
    for (int i = 0; i < bytes; i += 4) std::memcpy(out + i * kPanel + lane * 4, in + i, 4);
}

struct PackJob {
    const Encoding* encoding;
    const Matrix* matrix;
    const uint8_t* source;
    uint8_t* packed;
    int first_panel, end_panel, end_row;
    std::atomic<int> next;
};

void pack_panels(void* context, int) {
    auto& job = *static_cast<PackJob*>(context);
    const Encoding& e = *job.encoding;
    const int blocks = job.matrix->cols / e.weights;
    const size_t row_bytes = static_cast<size_t>(blocks) * e.bytes;
    for (int panel; (panel = job.next.fetch_add(1)) < job.end_panel;) {
        uint8_t* out = job.packed + panel * job.matrix->panel_stride;
        for (int lane = 0; lane < kPanel && panel * kPanel + lane < job.end_row; ++lane) {
            const auto row = static_cast<size_t>((panel - job.first_panel) * kPanel + lane);
            const uint8_t* in = job.source + row * row_bytes;
            for (int g = 0; g < blocks; ++g) pack_block(e, in + static_cast<size_t>(g) * e.bytes, out, g, lane);
        }
    }
}

std::string matrix_of(const std::string& encoding, int64_t rows, int64_t cols) {
    return encoding + " matrix of " + std::to_string(rows) + " x " + std::to_string(cols);
}

// Shape and strides without memory.
Matrix shaped(const Encoding& e, int64_t rows, int64_t cols) {
    if (rows < 1 || cols < 1 || rows > INT_MAX - kPanel || cols > INT_MAX / 64 || cols % e.weights)
        throw std::invalid_argument(matrix_of(e.name, rows, cols) +
                                    ": sizes must be positive and columns a multiple of " + std::to_string(e.weights));
    Matrix m{e.kind, static_cast<int>(rows), static_cast<int>(cols), 0, 0, nullptr};
    m.panels = (m.rows + kPanel - 1) / kPanel;
    const int padded = m.kind == WeightKind::kBf16 ? (m.cols + kGroup - 1) / kGroup * kGroup : m.cols;
    m.panel_stride = static_cast<size_t>(padded / e.weights) * e.block_bytes;
    return m;
}

}  // namespace

size_t packed_size(const std::string& encoding, int64_t rows, int64_t cols) {
    const Matrix m = shaped(find_encoding(encoding), rows, cols);
    return m.panel_stride * static_cast<size_t>(m.panels);
}

std::shared_ptr<PackedMatrix> allocate_matrix(const std::string& encoding, int64_t rows, int64_t cols) {
    auto packed = std::make_shared<PackedMatrix>();
    packed->view = shaped(find_encoding(encoding), rows, cols);
    packed->encoding = encoding;
    Matrix& m = packed->view;
    packed->storage =
        PageBuffer(m.panel_stride * static_cast<size_t>(m.panels) + 64);  // kernels may load a line beyond
    m.data = packed->storage.data();
    return packed;
}

void fill_rows(PackedMatrix& packed, int64_t first_row, std::span<const uint8_t> bytes, ThreadPool& pool) {
    const Encoding& e = find_encoding(packed.encoding);
    const Matrix& m = packed.view;
    const size_t row_bytes = static_cast<size_t>(m.cols / e.weights) * e.bytes;
    const size_t rows = bytes.size() / row_bytes, left = static_cast<size_t>(m.rows - first_row);
    if (first_row < 0 || first_row >= m.rows || first_row % kPanel || bytes.size() % row_bytes || rows > left ||
        (rows % kPanel && rows < left))
        throw std::invalid_argument(std::to_string(bytes.size()) + " bytes from row " + std::to_string(first_row) +
                                    " on are not whole panels of a " + matrix_of(e.name, m.rows, m.cols));
    const int first_panel = static_cast<int>(first_row) / kPanel, end_row = static_cast<int>(first_row + rows);
    PackJob job{&e,      &m,         bytes.data(), packed.storage.data(), first_panel, (end_row + kPanel - 1) / kPanel,
                end_row, first_panel};
    pool.run(pack_panels, &job);
}

std::shared_ptr<PackedMatrix> pack_matrix(const std::string& encoding, int64_t rows, int64_t cols,
                                          std::span<const uint8_t> bytes, ThreadPool& pool) {
    const Encoding& e = find_encoding(encoding);
    auto packed = allocate_matrix(encoding, rows, cols);
    const size_t expected = static_cast<size_t>(rows) * static_cast<size_t>(cols / e.weights) * e.bytes;
    if (bytes.size() != expected)
        throw std::invalid_argument(matrix_of(encoding, rows, cols) + " takes " + std::to_string(expected) +
                                    " bytes, got " + std::to_string(bytes.size()));
    fill_rows(*packed, 0, bytes, pool);
    return packed;
}

}  // namespace octavo
