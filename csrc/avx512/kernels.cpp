// The kernel table for AVX-512 (F, BW, DQ, VL, VNNI). Compiled a second time against emulation/avx512.h for tests.
#include "../simd/avx512.h"

#define OCTAVO_ATTENTION_ROWS 12  // 12 accumulators, K or V, a broadcast; a multiple of 3 and 4 query heads per KV head

#include "../ops/attention.h"
#include "../ops/dequantise.h"
#include "../ops/elementwise.h"
#include "../ops/linear_float.h"
#include "../ops/rope_kv.h"
#include "../ops/scan.h"
#include "linear_int.h"

namespace octavo {

#if defined(OCTAVO_EMULATED)
const Kernels& avx512_emulated_kernels() {
    static constexpr const char* kName = "avx512-emulated";
#else
const Kernels& avx512_kernels() {
    static constexpr const char* kName = "avx512";
#endif
    static constexpr Kernels table = {
        kName,
        {linear_float<LoadF32>, linear_float<LoadF16>, linear_float<LoadBf16>, linear_int<WeightKind::kInt8>,
         linear_int<WeightKind::kInt4>, linear_int<WeightKind::kInt4Z>},
        dequantise_row,
        quantise,
        rms_norm,
        rope,
        write_kv,
        attend,
        widen,
        attention_merge,
        attention_finish,
        gated_mul,
        add_arrays,
        scale_array,
        soft_cap,
        argmax,
        block_max,
        softmax_terms,
    };
    return table;
}

}  // namespace octavo
