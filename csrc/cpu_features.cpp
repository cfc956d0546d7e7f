#include "cpu_features.h"

#include <stdexcept>

#include "self_check.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace octavo {

namespace {

#if defined(__x86_64__)
// Extended control register 0: which register states the OS saves on a context switch.
uint64_t xgetbv0() {
    uint32_t low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (static_cast<uint64_t>(high) << 32) | low;
}

bool bit(unsigned word, int index) { return (word >> index) & 1u; }

// Linux gives tiles only to processes that ask, and only to threads that start afterwards: once, before any worker
// does.
bool permit_tiles() {
#if defined(__linux__)
    constexpr long kArchReqXcompPerm = 0x1023, kTileData = 18;
    return syscall(SYS_arch_prctl, kArchReqXcompPerm, kTileData) == 0;
#else
    return false;
#endif
}

CpuFeatures detect() {
    CpuFeatures found;
    unsigned a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d)) return found;
    const bool osxsave = bit(c, 27), fma = bit(c, 12), f16c = bit(c, 29), avx = bit(c, 28);
    if (!osxsave || !avx) return found;
    const uint64_t state = xgetbv0();
    if ((state & 0x6) != 0x6) return found;  // XMM and YMM
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return found;
    found.avx2 = bit(b, 5) && fma && f16c;
    const bool zmm = (state & 0xE6) == 0xE6;
    const bool foundation = bit(b, 16) && bit(b, 17) && bit(b, 30) && bit(b, 31);  // F, DQ, BW, VL
    found.avx512 = found.avx2 && zmm && foundation && bit(c, 11);                  // VNNI
    const bool tile_state = (state & 0x60000) == 0x60000;                          // TILECFG and TILEDATA
    const bool tiles = found.avx512 && tile_state && bit(d, 24) && permit_tiles();
    const bool tiles_bf16 = tiles && bit(d, 22);
    if (!__get_cpuid_count(7, 1, &a, &b, &c, &d)) return found;
    found.amx_bf16 = tiles_bf16 && bit(a, 5);  // and AVX512_BF16, which every CPU with AMX has
    return found;
}
#else
CpuFeatures detect() { return {}; }
#endif

struct Table {
    const char* name;
    bool usable;
    const Kernels& (*get)();
};

std::vector<Table> tables() {
    const CpuFeatures& cpu = cpu_features();
    (void)cpu;
    return {
        {"generic", true, generic_kernels},
#if defined(OCTAVO_EMULATE)
        {"avx512-emulated", cpu.avx2, avx512_emulated_kernels},
        {"amx-emulated", cpu.avx2, amx_emulated_kernels},
#endif
#if defined(OCTAVO_AVX2)
        {"avx2", cpu.avx2, avx2_kernels},
#endif
#if defined(OCTAVO_AVX512)
        {"avx512", cpu.avx512, avx512_kernels},
#endif
#if defined(OCTAVO_AMX)
        {"amx", cpu.amx_bf16, amx_kernels},
#endif
    };
}

}  // namespace

const CpuFeatures& cpu_features() {
    static const CpuFeatures features = detect();
    return features;
}

std::vector<std::string> available_isas() {
    std::vector<std::string> names;
    for (const Table& table : tables())
        if (table.usable) names.emplace_back(table.name);
    return names;
}

const Kernels& select_kernels(const std::string& isa) {
    const std::vector<Table> all = tables();
    std::string choices;
    for (const Table& table : all)
        if (table.usable) choices += (choices.empty() ? "" : ", ") + std::string(table.name);
    for (auto table = all.rbegin(); table != all.rend(); ++table) {
        if (!table->usable || (!isa.empty() && isa != table->name)) continue;
        if (agrees_with_generic(table->get())) return table->get();
        if (!isa.empty())
            throw std::invalid_argument("OCTAVO_ISA is '" + isa +
                                        "' but its kernels compute something else than the generic " +
                                        "ones on this machine; choose another of " + choices);
    }
    throw std::invalid_argument("OCTAVO_ISA is '" + isa + "' but this CPU and build offer " + choices);
}

}  // namespace octavo
