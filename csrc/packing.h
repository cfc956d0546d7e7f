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
};

// encoding: as in weights/dequantise.py. bytes: the file's, rows of K values or of groups of 32.
// Throws std::invalid_argument if a size does not fit.
std::shared_ptr<PackedMatrix> pack_matrix(const std::string& encoding, int64_t rows, int64_t cols,
                                          std::span<const uint8_t> bytes, ThreadPool& pool);

}  // namespace octavo
