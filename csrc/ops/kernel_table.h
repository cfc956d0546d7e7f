// All kernels of one ISA as a table. Include one of simd/*.h first, define OCTAVO_ATTENTION_ROWS, and have linear_int.
#pragma once

#include "attention.h"
#include "attention_bf16.h"
#include "dequantise.h"
#include "elementwise.h"
#include "linear_bf16.h"
#include "linear_float.h"
#include "rope_kv.h"
#include "scan.h"

namespace {

constexpr octavo::Kernels kernel_table(const char* name) {
    using Kind = octavo::WeightKind;
    return {
        .name = name,
        .exact = octavo::Activations::kInt8,
        .linear_rows = 128,
        .linear_float = {linear_float<LoadF32>, linear_float<LoadF16>, linear_float<LoadBf16>},
        .linear_int8 = {nullptr, nullptr, nullptr, linear_int<Kind::kInt8>, linear_int<Kind::kInt4>,
                        linear_int<Kind::kInt4Z>, linear_int<Kind::kInt5>, linear_int<Kind::kInt5Z>,
                        linear_int<Kind::kInt2K>, linear_int<Kind::kInt3K>, linear_int<Kind::kInt4K>,
                        linear_int<Kind::kInt5K>, linear_int<Kind::kInt6K>, linear_int<Kind::kInt8K>,
                        linear_int<Kind::kCode4>, linear_int<Kind::kCode4K>},
        .linear_bf16 = {nullptr, nullptr, linear_bf16<Kind::kBf16>, linear_bf16<Kind::kInt8>, linear_bf16<Kind::kInt4>,
                        linear_bf16<Kind::kInt4Z>, linear_bf16<Kind::kInt5>, linear_bf16<Kind::kInt5Z>,
                        linear_bf16<Kind::kInt2K>, linear_bf16<Kind::kInt3K>, linear_bf16<Kind::kInt4K>,
                        linear_bf16<Kind::kInt5K>, linear_bf16<Kind::kInt6K>, linear_bf16<Kind::kInt8K>,
                        linear_bf16<Kind::kCode4>, linear_bf16<Kind::kCode4K>},
        .to_columns = nullptr,
        .dequantise_row = dequantise_row,
        .quantise = quantise,
        .round_bf16 = round_bf16,
        .rms_norm = rms_norm,
        .layer_norm = layer_norm,
        .rope = rope,
        .write_kv = write_kv,
        .attend = attend,
        .attend_bf16 = attend_bf16,
        .widen = widen,
        .attention_merge = attention_merge,
        .attention_finish = attention_finish,
        .gated_mul = gated_mul,
        .activation = activation,
        .add = add_arrays,
        .scale = scale_array,
        .soft_cap = soft_cap,
        .argmax = argmax,
        .block_max = block_max,
        .softmax_terms = softmax_terms,
    };
}

}  // namespace
