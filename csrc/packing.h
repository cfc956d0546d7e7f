// Weights in the layout that the kernels stream (ops/types.h), packed once at load.
#pragma once

#include <memory>
#include <span>
#include <string>

#include "memory.h"
#include "ops/types.h"
#include "thread_pool.h"

namespace octavo {

struct PackedMatrix {
    Matrix view;
    PageBuffer storage;
    std::string encoding;
};

// encoding: as in weights/dequantise.py, or I8_K of weights/repack.py. All throw std::invalid_argument if a size does
// not fit.

// Bytes that a packed matrix takes.
size_t packed_size(const std::string& encoding, int64_t rows, int64_t cols);
// One without weights, to be filled once.
std::shared_ptr<PackedMatrix> allocate_matrix(const std::string& encoding, int64_t rows, int64_t cols);
// Rows from first_row on, whole panels but for the last ones. bytes: the file's, rows of K values or of blocks.
void fill_rows(PackedMatrix& packed, int64_t first_row, std::span<const uint8_t> bytes, ThreadPool& pool);
// All at once.
std::shared_ptr<PackedMatrix> pack_matrix(const std::string& encoding, int64_t rows, int64_t cols,
                                          std::span<const uint8_t> bytes, ThreadPool& pool);

}  // namespace octavo
