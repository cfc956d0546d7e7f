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

// Whether ready() came true within the spin time.
template <class Ready>
bool spin_until(Ready&& ready) {
    const auto start = std::chrono::steady_clock::now();
    do {
        for (int i = 0; i < 64; ++i) {
            if (ready()) return true;
            pause();
        }
    } while (std::chrono::steady_clock::now() - start < kSpin);
    return false;
}

// Waits until `value` is no longer `old`: spinning, then asleep.
void wait_for_change(const std::atomic<uint32_t>& value, uint32_t old) {
    if (!spin_until([&] { return value.load(std::memory_order_acquire) != old; }))
        value.wait(old, std::memory_order_acquire);
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
        phase_.store(phase + 1, std::memory_order_release);
        phase_.notify_all();
        return;
    }
    wait_for_change(phase_, phase);
}

ThreadPool::ThreadPool(int threads) : barrier_(static_cast<uint32_t>(threads)), joined_(static_cast<size_t>(threads)) {
    for (int t = 1; t < threads; ++t) workers_.emplace_back([this, t] { work(t); });
}

ThreadPool::~ThreadPool() {
    stop_.store(true);
    start(0);
    for (std::thread& worker : workers_) worker.join();
}

// Announces the job that job_, shared_job_ and context_ describe.
void ThreadPool::start(uint32_t open) {
    open_.store(open);
    generation_.fetch_add(1);
    generation_.notify_all();
}

void ThreadPool::run(Job job, void* context) {
    const FlushDenormals flush;
    if (workers_.empty()) return job(context, 0);
    job_ = job;
    shared_job_ = nullptr;
    context_ = context;
    start(generation_.load() + 1);
    job(context, 0);
    barrier_.wait();  // nobody still works on this job
    open_.store(0);
    for (uint32_t inside; (inside = inside_.load()) != 0;) wait_for_change(inside_, inside);
}

void ThreadPool::run_shared(SharedJob job, void* context) {
    const FlushDenormals flush;
    if (workers_.empty()) {
        job(context, 0);
        return;
    }
    shared_job_ = job;
    context_ = context;
    start(generation_.load() + 1);
    job(context, 0);
    open_.store(0);  // nobody enters any more; those inside have found all items taken and are about to leave
    announce();
    for (uint32_t inside; (inside = inside_.load()) != 0;) wait_for_change(inside_, inside);
}

// Store-then-load on both sides (inside_ then open_ here, open_ then inside_ in run_shared), sequentially consistent:
// at least one of the two sees the other.
bool ThreadPool::enter(uint32_t generation) {
    inside_.fetch_add(1);
    if (open_.load() == generation) return true;
    leave();
    return false;
}

void ThreadPool::leave() {
    inside_.fetch_sub(1);
    inside_.notify_all();
}

void ThreadPool::announce() {
    events_.fetch_add(1);
    events_.notify_all();
}

WorkCounter* ThreadPool::counters(size_t count) {
    if (count > num_counters_) {
        num_counters_ = count;
        counters_.push_back(std::make_unique<WorkCounter[]>(count));
    }
    WorkCounter* counters = counters_.back().get();
    for (size_t i = 0; i < count; ++i) {
        counters[i].next.store(0, std::memory_order_relaxed);
        counters[i].done.store(0, std::memory_order_relaxed);
    }
    return counters;
}

bool ThreadPool::await(const WorkCounter& counter, uint32_t total, int thread) {
    const uint32_t generation = joined_[static_cast<size_t>(thread)];
    if (thread != 0) leave();  // the job may go on, and even end, without it
    const auto ready = [&] {
        return counter.done.load(std::memory_order_acquire) == total || (thread != 0 && open_.load() != generation);
    };
    while (!spin_until(ready)) {
        const uint32_t seen = events_.load();
        if (!ready()) events_.wait(seen);
    }
    return thread == 0 || enter(generation);
}

void ThreadPool::work(int thread) {
    const FlushDenormals flush;
    for (uint32_t seen = 0;;) {
        wait_for_change(generation_, seen);
        seen = generation_.load();
        if (stop_.load()) return;
        joined_[static_cast<size_t>(thread)] = seen;
        if (!enter(seen)) continue;  // it came too late
        if (SharedJob shared = shared_job_) {
            if (shared(context_, thread)) leave();
        } else {
            job_(context_, thread);
            barrier_.wait();
            leave();
        }
    }
}

}  // namespace octavo
