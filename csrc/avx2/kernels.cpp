// The kernel table for AVX2 + FMA + F16C. The linear layers with integer weights are in linear_int.h beside this file.
#include "../simd/avx2.h"

#define OCTAVO_ATTENTION_ROWS 6  // 12 accumulators, 2 of K or V, 1 broadcast: all 16 registers

#include "../ops/attention.h"
#include "../ops/dequantise.h"
#include "../ops/elementwise.h"
#include "../ops/linear_float.h"
#include "../ops/rope_kv.h"
#include "../ops/scan.h"
#include "linear_int.h"

namespace octavo {

const Kernels& avx2_kernels() {
    static constexpr Kernels table = {
        "avx2",
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
