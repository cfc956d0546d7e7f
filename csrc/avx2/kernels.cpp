// The kernel table for AVX2 + FMA + F16C.
#include "../simd/avx2.h"

#define OCTAVO_ATTENTION_ROWS 6  // 12 accumulators, 2 of K or V, 1 broadcast: all 16 registers

#include "linear_int.h"

#include "../ops/kernel_table.h"

namespace octavo {

const Kernels& avx2_kernels() {
    static constexpr Kernels table = kernel_table("avx2");
    return table;
}

}  // namespace octavo
