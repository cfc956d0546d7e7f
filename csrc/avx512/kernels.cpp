// The kernel table for AVX-512 (F, BW, DQ, VL, VNNI). Compiled a second time against emulation/avx512.h for tests.
#include "../simd/avx512.h"

#define OCTAVO_ATTENTION_ROWS 12  // 12 accumulators, K or V, a broadcast; a multiple of 3 and 4 query heads per KV head

#include "linear_int.h"

#include "../ops/kernel_table.h"

namespace octavo {

#if defined(OCTAVO_EMULATED)
const Kernels& avx512_emulated_kernels() {
    static constexpr Kernels table = kernel_table("avx512-emulated");
#else
const Kernels& avx512_kernels() {
    static constexpr Kernels table = kernel_table("avx512");
#endif
    return table;
}

}  // namespace octavo
