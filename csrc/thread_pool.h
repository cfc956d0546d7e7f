// The compute threads: the caller is worker 0, the others spin for a moment after each job and then sleep.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
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
    alignas(64) std::atomic<uint32_t> sleepers_{0};
};

class ThreadPool {
  public:
    using Job = void (*)(void* context, int thread);

    explicit ThreadPool(int threads);
    ~ThreadPool();
    ThreadPool(const ThreadPool&) = delete;
    ThreadPool& operator=(const ThreadPool&) = delete;

    int size() const { return static_cast<int>(workers_.size()) + 1; }
    // Runs job(context, 0 .. size() - 1) and returns when all are done. One caller at a time. Jobs must not throw.
    void run(Job job, void* context);
    // For jobs: all threads of the running job meet here.
    void barrier() { barrier_.wait(); }

  private:
    void work(int thread);

    Job job_ = nullptr;
    void* context_ = nullptr;
    Barrier barrier_;
    alignas(64) std::atomic<uint32_t> generation_{0};
    alignas(64) std::atomic<bool> stop_{false};
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
