#include "packing.h"

#include <atomic>
#include <climits>
#include <cstring>
#include <stdexcept>

namespace octavo {

namespace {

struct Encoding {
    const char* name;
    WeightKind kind;
    int weights;      // per group of the file
    int bytes;        // per group of the file
    int group_bytes;  // per panel and group, packed
};

constexpr Encoding kEncodings[] = {
    {"F32", WeightKind::kF32, 1, 4, 4 * kPanel},       {"F16", WeightKind::kF16, 1, 2, 2 * kPanel},
    {"BF16", WeightKind::kBf16, 1, 2, 2 * kPanel},     {"Q8_0", WeightKind::kInt8, 32, 34, 34 * kPanel},
    {"Q4_0", WeightKind::kInt4Z, 32, 18, 18 * kPanel}, {"Q4_1", WeightKind::kInt4, 32, 20, 20 * kPanel},
};

const Encoding& find_encoding(const std::string& name) {
    for (const Encoding& e : kEncodings)
        if (name == e.name) return e;
    throw std::invalid_argument("weight encoding " + name + " has no native kernels");
}

// Group g of one column into its lane of the packed panel.
void pack_group(const Encoding& e, const uint8_t* in, uint8_t* panel, int g, int lane) {
    if (e.kind == WeightKind::kBf16) {
        std::memcpy(panel + (static_cast<size_t>(g / 2) * kPanel + lane) * 4 + g % 2 * 2, in, 2);
        return;
    }
    uint8_t* out = panel + static_cast<size_t>(g) * e.group_bytes;
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
    std::atomic<int> next{0};
};

void pack_panels(void* context, int) {
    auto& job = *static_cast<PackJob*>(context);
    const Encoding& e = *job.encoding;
    const int groups = job.matrix->cols / e.weights;
    const size_t row_bytes = static_cast<size_t>(groups) * e.bytes;
    for (int panel; (panel = job.next.fetch_add(1)) < job.matrix->panels;) {
        uint8_t* out = job.packed + panel * job.matrix->panel_stride;
        for (int lane = 0; lane < kPanel && panel * kPanel + lane < job.matrix->rows; ++lane) {
            const uint8_t* in = job.source + (static_cast<size_t>(panel) * kPanel + lane) * row_bytes;
            for (int g = 0; g < groups; ++g) pack_group(e, in + static_cast<size_t>(g) * e.bytes, out, g, lane);
        }
    }
}

}  // namespace

std::shared_ptr<PackedMatrix> pack_matrix(const std::string& encoding, int64_t rows, int64_t cols,
                                          std::span<const uint8_t> bytes, ThreadPool& pool) {
    const Encoding& e = find_encoding(encoding);
    if (rows < 1 || cols < 1 || rows > INT_MAX - kPanel || cols > INT_MAX / 64 || cols % e.weights)
        throw std::invalid_argument(encoding + " matrix of " + std::to_string(rows) + " x " + std::to_string(cols) +
                                    ": sizes must be positive and columns a multiple of " + std::to_string(e.weights));
    const size_t expected = static_cast<size_t>(rows) * static_cast<size_t>(cols / e.weights) * e.bytes;
    if (bytes.size() != expected)
        throw std::invalid_argument(encoding + " matrix of " + std::to_string(rows) + " x " + std::to_string(cols) +
                                    " takes " + std::to_string(expected) + " bytes, got " +
                                    std::to_string(bytes.size()));
    auto packed = std::make_shared<PackedMatrix>();
    Matrix& m = packed->view;
    m.kind = e.kind;
    m.rows = static_cast<int>(rows);
    m.cols = static_cast<int>(cols);
    m.panels = (m.rows + kPanel - 1) / kPanel;
    const int padded = m.kind == WeightKind::kBf16 ? (m.cols + kGroup - 1) / kGroup * kGroup : m.cols;
    m.panel_stride = static_cast<size_t>(padded / e.weights) * e.group_bytes;
    packed->storage =
        PageBuffer(m.panel_stride * static_cast<size_t>(m.panels) + 64);  // kernels may load a line beyond
    m.data = packed->storage.data();
    PackJob job{&e, &m, bytes.data(), packed->storage.data()};
    pool.run(pack_panels, &job);
    return packed;
}

}  // namespace octavo
