// What the machine can do at best: how fast memory is read, how fast the arithmetic of the kernels runs in registers.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "thread_pool.h"

namespace octavo {

// Bytes per second at which all threads together read a working set of each size (bytes, ascending) over and over: from
// the caches while it fits, from memory beyond. The best of what fits into `seconds` per size.
std::vector<double> read_bandwidths(ThreadPool& pool, const std::vector<size_t>& sizes, double seconds);

// Multiply-adds per second of all threads together, per kind of arithmetic that the kernel table `isa` and this CPU
// offer: "float32", "int8" (exact integer products of quantised weights), "bf16". Register to register; no loads, no
// dequantisation. The best of what fits into `seconds` per kind.
std::vector<std::pair<std::string, double>> multiply_add_rates(ThreadPool& pool, const std::string& isa,
                                                               double seconds);

}  // namespace octavo
