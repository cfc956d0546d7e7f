#include "thread_pool.h"

#include <chrono>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace octavo {

namespace {

constexpr auto kSpin = std::chrono::microseconds(20);

inline void pause() {
#if defined(__x86_64__)
    _mm_pause();
#endif
}

// Whether `value` left `old` within the spin time.
bool spin_until_changed(const std::atomic<uint32_t>& value, uint32_t old) {
    const auto start = std::chrono::steady_clock::now();
    do {
        for (int i = 0; i < 64; ++i) {
            if (value.load(std::memory_order_acquire) != old) return true;
            pause();
        }
    } while (std::chrono::steady_clock::now() - start < kSpin);
    return false;
}

}  // namespace

FlushDenormals::FlushDenormals() {
#if defined(__x86_64__)
    saved_ = _mm_getcsr();
    _mm_setcsr(saved_ | 0x8040u);  // FTZ | DAZ
#endif
}

FlushDenormals::~FlushDenormals() {
#if defined(__x86_64__)
    _mm_setcsr(saved_);
#endif
}

void Barrier::wait() {
    if (threads_ == 1) return;
    const uint32_t phase = phase_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == threads_) {
        arrived_.store(0, std::memory_order_relaxed);
        phase_.store(phase + 1, std::memory_order_seq_cst);
        if (sleepers_.load(std::memory_order_seq_cst)) phase_.notify_all();
        return;
    }
    if (spin_until_changed(phase_, phase)) return;
    sleepers_.fetch_add(1, std::memory_order_seq_cst);
    phase_.wait(phase, std::memory_order_seq_cst);
    sleepers_.fetch_sub(1, std::memory_order_relaxed);
}

ThreadPool::ThreadPool(int threads) : barrier_(static_cast<uint32_t>(threads)) {
    for (int t = 1; t < threads; ++t) workers_.emplace_back([this, t] { work(t); });
}

ThreadPool::~ThreadPool() {
    stop_.store(true, std::memory_order_release);
    generation_.fetch_add(1, std::memory_order_release);
    generation_.notify_all();
    for (std::thread& worker : workers_) worker.join();
}

void ThreadPool::run(Job job, void* context) {
    const FlushDenormals flush;
    job_ = job;
    context_ = context;
    if (!workers_.empty()) {
        generation_.fetch_add(1, std::memory_order_release);
        generation_.notify_all();
    }
    job(context, 0);
    barrier_.wait();  // nobody still works on this job
}

void ThreadPool::work(int thread) {
    const FlushDenormals flush;
    for (uint32_t seen = 0;; ++seen) {
        if (!spin_until_changed(generation_, seen)) generation_.wait(seen, std::memory_order_acquire);
        if (stop_.load(std::memory_order_acquire)) return;
        job_(context_, thread);
        barrier_.wait();
    }
}

}  // namespace octavo
