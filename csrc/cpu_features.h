// What this CPU and this operating system allow. Compiled with baseline flags: it runs before anything else may.
#pragma once

#include <string>
#include <vector>

#include "ops/types.h"

namespace octavo {

struct CpuFeatures {
    bool avx2 = false;      // AVX2, FMA and F16C, with YMM state enabled by the OS
    bool avx512 = false;    // F, BW, DQ, VL and VNNI, with ZMM state
    bool amx_bf16 = false;  // AMX tiles and BF16, permission granted by the OS, beside avx512 and AVX512_BF16
};

const CpuFeatures& cpu_features();  // asked once

// The kernel tables that this host can run, best last. "generic" is always there.
std::vector<std::string> available_isas();
// The table of that name, or, if empty, the best one that agrees with the generic kernels on this machine.
// Throws std::invalid_argument naming the choices.
const Kernels& select_kernels(const std::string& isa);

}  // namespace octavo
