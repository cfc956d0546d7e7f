// Baseline flags. Functions for one ISA carry a target attribute, call nothing but intrinsics and are internal, so that
// no code of theirs can reach another CPU (see cpu_features.h for who may run what).
#include "measure.h"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>

#include "cpu_features.h"
#include "memory.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace octavo {

namespace {

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

// Runs body(thread) on all threads; seconds from the moment that all were there until all were done.
template <class Body>
double time_on_all(ThreadPool& pool, const Body& body) {
    struct Shared {
        ThreadPool& pool;
        const Body& body;
        double start = 0.0, end = 0.0;
    } shared{pool, body};
    pool.run(
        [](void* context, int thread) {
            Shared& s = *static_cast<Shared*>(context);
            s.pool.barrier();
            if (thread == 0) s.start = now();
            s.body(thread);
            s.pool.barrier();
            if (thread == 0) s.end = now();
        },
        &shared);
    return shared.end - shared.start;
}

// The best rate (units per second) of repeated runs of body(thread, repeats), each long enough for the clock.
template <class Body>
double best_rate(ThreadPool& pool, double units_per_repeat, double seconds, const Body& body) {
    constexpr double kShortest = 2e-3;
    int64_t repeats = 1;
    double best = 0.0;
    for (const double end = now() + seconds; best == 0.0 || now() < end;) {
        const double took = time_on_all(pool, [&](int thread) { body(thread, repeats); });
        if (took < kShortest && repeats < int64_t{1} << 40) {
            repeats *= took < kShortest / 8 ? 8 : 2;
            continue;
        }
        best = std::max(best, units_per_repeat * static_cast<double>(repeats) / took);
    }
    return best;
}

// Reads `bytes`, a multiple of 256, as the kernels do: in order, fetching ahead (the hardware's prefetcher stops at
// pages).
uint64_t read_all(const uint8_t* data, size_t bytes) {
    typedef uint64_t Lanes __attribute__((vector_size(16)));
    Lanes sums[4] = {};
    for (size_t i = 0; i < bytes; i += 256) {
        for (size_t line = 0; line < 256; line += 64) __builtin_prefetch(data + i + 2048 + line);
        for (size_t j = 0; j < 256; j += 64)
            for (size_t lane = 0; lane < 4; ++lane) {
                Lanes piece;
                std::memcpy(&piece, data + i + j + 16 * lane, sizeof(piece));
                sums[lane] ^= piece;
            }
    }
    const Lanes all = sums[0] ^ sums[1] ^ sums[2] ^ sums[3];
    return all[0] ^ all[1];
}

// Loops of twelve independent chains: enough to hide the latency of one, few enough for 16 registers.
struct Arithmetic {
    const char* name;
    double multiply_adds;  // of one repeat
    void (*run)(int64_t repeats);
};

constexpr int kChains = 12;
#define OCTAVO_TWELVE(step) \
    step(s0) step(s1) step(s2) step(s3) step(s4) step(s5) step(s6) step(s7) step(s8) step(s9) step(s10) step(s11)
#define OCTAVO_CHAINS(Vector, start)                                                                                   \
    Vector s0 = start, s1 = start, s2 = start, s3 = start, s4 = start, s5 = start, s6 = start, s7 = start, s8 = start, \
           s9 = start, s10 = start, s11 = start

// Makes a value unknown to the compiler, so that it neither hoists nor removes what is computed with it.
#if defined(__x86_64__)
#define OCTAVO_OPAQUE(x) __asm__ volatile("" : "+v"(x))
#elif defined(__aarch64__)
#define OCTAVO_OPAQUE(x) __asm__ volatile("" : "+w"(x))
#else
#define OCTAVO_OPAQUE(x) __asm__ volatile("" : "+m"(x))
#endif

// What a compiler makes of plain C++ on any CPU: 128-bit vectors. Kernels for int8 widen to 16 bits there.
template <class Lane>
void portable_chains(int64_t repeats) {
    typedef Lane Vector __attribute__((vector_size(16)));
    Vector x = {}, y = {};
    for (size_t i = 0; i < 16 / sizeof(Lane); ++i) x[i] = static_cast<Lane>(i + 1), y[i] = static_cast<Lane>(i % 3);
    OCTAVO_CHAINS(Vector, x);
    for (int64_t i = 0; i < repeats; ++i) {
#define OCTAVO_STEP(s) \
    OCTAVO_OPAQUE(x);  \
    s += x * y;        \
    OCTAVO_OPAQUE(s);
        OCTAVO_TWELVE(OCTAVO_STEP)
#undef OCTAVO_STEP
    }
}

#if defined(__x86_64__)
#define OCTAVO_TARGET(isa) __attribute__((target(isa)))

OCTAVO_TARGET("avx2,fma") void avx2_float(int64_t repeats) {
    const __m256 x = _mm256_setr_ps(1.5f, -0.25f, 0.7f, -1.1f, 0.3f, 0.9f, -0.6f, 2.0f), y = _mm256_set1_ps(1e-6f);
    OCTAVO_CHAINS(__m256, x);
    for (int64_t i = 0; i < repeats; ++i) {
#define OCTAVO_STEP(s)            \
    s = _mm256_fmadd_ps(x, y, s); \
    OCTAVO_OPAQUE(s);
        OCTAVO_TWELVE(OCTAVO_STEP)
#undef OCTAVO_STEP
    }
}

// maddubs and a 16-bit sum: what the int4 kernel needs for 32 products.
OCTAVO_TARGET("avx2,fma") void avx2_int8(int64_t repeats) {
    const __m256i x = _mm256_set1_epi32(0x0B030D07);
    __m256i y = _mm256_set1_epi32(0x15F3E822);
    OCTAVO_CHAINS(__m256i, x);
    for (int64_t i = 0; i < repeats; ++i) {
#define OCTAVO_STEP(s)                                   \
    OCTAVO_OPAQUE(y);                                    \
    s = _mm256_add_epi16(s, _mm256_maddubs_epi16(x, y)); \
    OCTAVO_OPAQUE(s);
        OCTAVO_TWELVE(OCTAVO_STEP)
#undef OCTAVO_STEP
    }
}

OCTAVO_TARGET("avx512f") void avx512_float(int64_t repeats) {
    const __m512 x = _mm512_set1_ps(1.37f), y = _mm512_set1_ps(-0.93e-6f);
    OCTAVO_CHAINS(__m512, x);
    for (int64_t i = 0; i < repeats; ++i) {
#define OCTAVO_STEP(s)            \
    s = _mm512_fmadd_ps(x, y, s); \
    OCTAVO_OPAQUE(s);
        OCTAVO_TWELVE(OCTAVO_STEP)
#undef OCTAVO_STEP
    }
}

OCTAVO_TARGET("avx512f,avx512vnni") void avx512_int8(int64_t repeats) {
    const __m512i x = _mm512_set1_epi32(0x0B030D07), y = _mm512_set1_epi32(0x15F3E822);
    OCTAVO_CHAINS(__m512i, x);
    for (int64_t i = 0; i < repeats; ++i) {
#define OCTAVO_STEP(s)                \
    s = _mm512_dpbusd_epi32(s, x, y); \
    OCTAVO_OPAQUE(s);
        OCTAVO_TWELVE(OCTAVO_STEP)
#undef OCTAVO_STEP
    }
}

struct alignas(64) TileConfig {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
};
// Static: the instruction reads all 64 bytes, whatever the compiler thinks of them.
constexpr TileConfig kTiles = {1, 0, {}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};

// Four sums of 16 x 16 from two tiles of each operand. Ordinary data: zeros draw less power, and run faster than any
// model does. In assembly, since the compiler's tile intrinsics do not say which memory they read.
OCTAVO_TARGET("amx-tile,amx-bf16") void amx_bf16(int64_t repeats) {
    alignas(64) uint16_t data[2][512];
    uint32_t random = 1;
    for (auto& tile : data)
        for (uint16_t& value : tile) {
            random = random * 1664525u + 1013904223u;
            value = static_cast<uint16_t>(0x3E80u | (random >> 16 & 0x80FFu));  // magnitudes from 0.25 to 1
        }
    TileConfig before;  // a worker may keep one for the kernels
    __asm__ volatile("sttilecfg %0" : "=m"(before));
    __asm__ volatile("ldtilecfg %0" : : "m"(kTiles));
    const int64_t stride = 64;
    __asm__ volatile(
        "tileloadd (%0,%2,1), %%tmm4\n\ttileloadd (%1,%2,1), %%tmm5\n\t"
        "tileloadd (%1,%2,1), %%tmm6\n\ttileloadd (%0,%2,1), %%tmm7\n\t"
        "tilezero %%tmm0\n\ttilezero %%tmm1\n\ttilezero %%tmm2\n\ttilezero %%tmm3"
        :
        : "r"(data[0]), "r"(data[1]), "r"(stride)
        : "memory");
    for (int64_t i = 0; i < repeats; ++i)
        __asm__ volatile(
            "tdpbf16ps %tmm6, %tmm4, %tmm0\n\ttdpbf16ps %tmm7, %tmm4, %tmm1\n\t"
            "tdpbf16ps %tmm6, %tmm5, %tmm2\n\ttdpbf16ps %tmm7, %tmm5, %tmm3");
    __asm__ volatile("ldtilecfg %0" : : "m"(before));
}

std::vector<Arithmetic> arithmetics(const std::string& isa) {
    const CpuFeatures& cpu = cpu_features();
    std::vector<Arithmetic> found;
    if (cpu.avx512 && (isa.starts_with("avx512") || isa.starts_with("amx"))) {
        found = {{"float32", 16.0 * kChains, avx512_float}, {"int8", 64.0 * kChains, avx512_int8}};
    } else if (cpu.avx2 && isa != "generic") {
        found = {{"float32", 8.0 * kChains, avx2_float}, {"int8", 32.0 * kChains, avx2_int8}};
    } else {
        found = {{"float32", 4.0 * kChains, portable_chains<float>}, {"int8", 8.0 * kChains, portable_chains<int16_t>}};
    }
    if (cpu.amx_bf16 && isa.starts_with("amx")) found.push_back({"bf16", 4.0 * 16 * 16 * 32, amx_bf16});
    return found;
}
#else
std::vector<Arithmetic> arithmetics(const std::string&) {
    return {{"float32", 4.0 * kChains, portable_chains<float>}, {"int8", 8.0 * kChains, portable_chains<int16_t>}};
}
#endif

}  // namespace

std::vector<double> read_bandwidths(ThreadPool& pool, const std::vector<size_t>& sizes, double seconds) {
    constexpr size_t kBlock = 256, kBeyond = 4096;  // kBeyond: what the last prefetches reach for
    const auto threads = static_cast<size_t>(pool.size());
    PageBuffer pages(*std::max_element(sizes.begin(), sizes.end()) + kBeyond);
    std::memset(pages.data(), 0x5A, pages.bytes());
    std::vector<double> rates;
    for (const size_t size : sizes) {
        const size_t share = std::max(kBlock, size / threads / kBlock * kBlock);
        rates.push_back(
            best_rate(pool, static_cast<double>(share * threads), seconds, [&](int thread, int64_t repeats) {
                const uint8_t* mine = pages.data() + static_cast<size_t>(thread) * share;
                for (int64_t i = 0; i < repeats; ++i) {
                    uint64_t sum = read_all(mine, share);
                    __asm__ volatile("" : "+r"(sum));  // or the reads would be removed
                }
            }));
    }
    return rates;
}

std::vector<std::pair<std::string, double>> multiply_add_rates(ThreadPool& pool, const std::string& isa,
                                                               double seconds) {
    std::vector<std::pair<std::string, double>> rates;
    for (const Arithmetic& a : arithmetics(isa))
        rates.emplace_back(a.name, best_rate(pool, a.multiply_adds * pool.size(), seconds,
                                             [&](int, int64_t repeats) { a.run(repeats); }));
    return rates;
}

}  // namespace octavo
