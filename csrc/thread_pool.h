// The compute threads: the caller is worker 0, the others spin for a moment after each job and then sleep.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

namespace octavo {

// A point that all threads of a job must reach. Spins, then sleeps: a thread may be off its core.
class Barrier {
  public:
    explicit Barrier(uint32_t threads) : threads_(threads) {}
    void wait();

  private:
    const uint32_t threads_;
    alignas(64) std::atomic<uint32_t> arrived_{0};
    alignas(64) std::atomic<uint32_t> phase_{0};
};

// The items of one stage of a shared job: given out one by one, finished in any order.
struct alignas(64) WorkCounter {
    std::atomic<uint32_t> next{0}, done{0};
};

class ThreadPool {
  public:
    using Job = void (*)(void* context, int thread);
    using SharedJob = bool (*)(void* context, int thread);

    explicit ThreadPool(int threads);
    ~ThreadPool();
    ThreadPool(const ThreadPool&) = delete;
    ThreadPool& operator=(const ThreadPool&) = delete;

    int size() const { return static_cast<int>(workers_.size()) + 1; }

    // Runs job(context, 0 .. size() - 1) and returns when all are done. One caller at a time. Jobs must not throw.
    void run(Job job, void* context);
    // For such jobs: all threads of the running job meet here.
    void barrier() { barrier_.wait(); }

    // Runs job(context, 0), and on other threads as they come. Nobody waits for a thread that has no item in hand: on a
    // busy machine one that is off its core costs its help, not everybody's time. The job's work lies in stages.
    void run_shared(SharedJob job, void* context);
    // Zeroed counters for the stages of the next shared job. They belong to the pool: a thread that was off its core
    // may still look at one after the job has ended.
    WorkCounter* counters(size_t count);
    // One stage: item(i) for each i of [0, total) that this thread gets, then waits until all of them are done.
    // False: the whole job has ended meanwhile, and the caller must return false at once and touch nothing of it.
    template <class Item>
    bool stage(WorkCounter& counter, uint32_t total, int thread, Item&& item) {
        uint32_t mine = 0;
        for (uint32_t i; (i = counter.next.fetch_add(1, std::memory_order_relaxed)) < total; ++mine)
            item(static_cast<int>(i));
        if (mine && counter.done.fetch_add(mine, std::memory_order_acq_rel) + mine == total) announce();
        return counter.done.load(std::memory_order_acquire) == total || await(counter, total, thread);
    }

  private:
    void work(int thread);
    void start(uint32_t open);
    bool enter(uint32_t generation);
    void leave();
    bool await(const WorkCounter& counter, uint32_t total, int thread);
    void announce();

    Job job_ = nullptr;
    SharedJob shared_job_ = nullptr;
    void* context_ = nullptr;
    Barrier barrier_;
    alignas(64) std::atomic<uint32_t> generation_{0};  // of the latest job
    alignas(64) std::atomic<uint32_t> open_{0};        // generation of the job that may be entered; 0: none
    alignas(64) std::atomic<uint32_t> inside_{0};      // workers that may touch the job's data
    alignas(64) std::atomic<uint32_t> events_{0};      // stages and jobs that have ended: what waiting threads sleep on
    std::atomic<bool> stop_{false};
    std::vector<uint32_t> joined_;                          // per thread, the generation that it works on
    std::vector<std::unique_ptr<WorkCounter[]>> counters_;  // the last is in use
    size_t num_counters_ = 0;
    std::vector<std::thread> workers_;
};

// Flush denormals to zero on this thread while it lives (x86: FTZ and DAZ). Every job runs under it.
class FlushDenormals {
  public:
    FlushDenormals();
    ~FlushDenormals();

  private:
    unsigned saved_ = 0;
};

}  // namespace octavo
