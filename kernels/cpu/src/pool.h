// Threads that run one function together and meet at barriers. Owns waiting; knows nothing of what is computed.
//
// Between runs the threads sleep on a futex: an idle pool uses no CPU. Inside a run they spin for microseconds before
// they sleep, and less when spinning has not paid lately (another process has the core that we wait for).
#pragma once

#include <pthread.h>

#include <atomic>
#include <cstdint>

namespace biphase {

constexpr int kMaxThreads = 256;

// Lets waiting threads see `word` change from what it was: a short spin, then the kernel.
class Gate {
  public:
    // Blocks while word() == old. `spin_ns` bounds the spin. Returns whether the spin sufficed.
    bool wait(uint32_t old, uint32_t spin_ns);
    // Adds one to the word and wakes every sleeper.
    void open();
    uint32_t word() const { return word_.load(std::memory_order_acquire); }

  private:
    alignas(64) std::atomic<uint32_t> word_{0};
    std::atomic<uint32_t> sleepers_{0};
};

class Pool {
  public:
    using Task = void (*)(void* argument, int thread);

    // `num_threads` counts the thread that calls run(). `nice` is added to the niceness of all of them.
    Pool(int num_threads, int nice);
    ~Pool();
    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;

    int num_threads() const { return num_threads_; }
    void run(Task task, void* argument);
    // Called by every thread inside a task; all return after the last has come. The last one to come
    // resets the shares of for_units() first.
    void barrier(int thread);

    // Calls f(unit) for every unit in [0, num_units), each exactly once over all threads: first the thread's own
    // contiguous share, then what is left of the others'. `ends`, where given, says where each thread's share ends; else
    // the shares are equal. Followed by barrier() before the next call.
    template <class F>
    void for_units(int thread, int num_units, F&& f, const int32_t* ends = nullptr) {
        for (int v = 0; v < num_threads_; ++v) {
            int owner = thread + v;
            if (owner >= num_threads_) owner -= num_threads_;
            int first = ends ? (owner ? ends[owner - 1] : 0) : part(num_units, owner);
            int last = ends ? ends[owner] : part(num_units, owner + 1);
            for (;;) {
                int unit = first + shares_[owner].next.fetch_add(1, std::memory_order_relaxed);
                if (unit >= last) break;
                f(unit);
            }
        }
    }

  private:
    struct alignas(64) Share {
        std::atomic<int> next{0};
    };
    struct alignas(64) Spin {
        uint32_t ns = 0;
    };

    int part(int num_units, int owner) const {
        return static_cast<int>(static_cast<int64_t>(num_units) * owner / num_threads_);
    }
    static void* enter(void* start);
    void serve(int thread);

    int num_threads_;
    int nice_;
    int started_ = 0;
    bool stopping_ = false;
    Task task_ = nullptr;
    void* argument_ = nullptr;
    pthread_t threads_[kMaxThreads];
    Gate start_;
    Gate meet_;
    alignas(64) std::atomic<int> arrived_{0};
    Share shares_[kMaxThreads];
    Spin spin_[kMaxThreads];
    int niced_caller_ = 0;
};

}  // namespace biphase
