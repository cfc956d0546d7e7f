// The AVX-512 table, with AMX (TILE, BF16) and AVX512_BF16 for products in bfloat16, which are its numerics "exact".
// Compiled a second time against emulation/ for tests.
#include "../simd/avx512.h"
#if defined(OCTAVO_EMULATED)
#include "../emulation/amx.h"
#else
#include "tiles.h"
#endif

#define OCTAVO_ATTENTION_ROWS 12  // for heads that are too large for tiles

#include "attention_bf16.h"
#include "linear_bf16.h"

namespace {

template <WeightKind Kind>
void set_linear(octavo::Kernels& table) {
    table.linear_bf16[static_cast<int>(Kind)] = linear_bf16_tiles<Kind>;
}

}  // namespace

namespace octavo {

#if defined(OCTAVO_EMULATED)
const Kernels& amx_emulated_kernels() {
    static Kernels table = avx512_emulated_kernels();
    table.name = "amx-emulated";
#else
const Kernels& amx_kernels() {
    static Kernels table = avx512_kernels();
    table.name = "amx";
#endif
    table.exact = Activations::kBf16;
    table.linear_rows = kMaxLinearRows;
    set_linear<WeightKind::kBf16>(table);
    set_linear<WeightKind::kInt8>(table);
    set_linear<WeightKind::kInt4>(table);
    set_linear<WeightKind::kInt4Z>(table);
    set_linear<WeightKind::kInt5>(table);
    set_linear<WeightKind::kInt5Z>(table);
    set_linear<WeightKind::kInt2K>(table);
    set_linear<WeightKind::kInt3K>(table);
    set_linear<WeightKind::kInt4K>(table);
    set_linear<WeightKind::kInt5K>(table);
    set_linear<WeightKind::kInt6K>(table);
    set_linear<WeightKind::kInt8K>(table);
    set_linear<WeightKind::kCode4>(table);
    set_linear<WeightKind::kCode4K>(table);
    table.round_bf16 = round_pairs;
    table.to_columns = to_columns;
    table.attend_bf16 = attend_bf16_tiles;
    return table;
}

}  // namespace octavo
