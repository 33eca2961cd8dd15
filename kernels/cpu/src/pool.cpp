#include "pool.h"

#include <linux/futex.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <climits>

namespace biphase {
namespace {

// Longer than the usual imbalance of two threads at a barrier, shorter than a scheduler's tick by far.
constexpr uint32_t kMaxSpinNs = 20000;
constexpr uint32_t kMinSpinNs = 1000;
// Between runs: the next step of a busy engine comes later than any decent spin.
constexpr uint32_t kStartSpinNs = 5000;

uint64_t now_ns() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return static_cast<uint64_t>(t.tv_sec) * 1000000000u + static_cast<uint64_t>(t.tv_nsec);
}

void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

long futex(std::atomic<uint32_t>* word, int operation, uint32_t value) {
    return syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), operation, value, nullptr, nullptr, 0);
}

void add_nice(int nice) {
    if (nice == 0) return;
    id_t tid = static_cast<id_t>(syscall(SYS_gettid));
    setpriority(PRIO_PROCESS, tid, getpriority(PRIO_PROCESS, tid) + nice);
}

struct Start {
    Pool* pool;
    int thread;
};

}  // namespace

bool Gate::wait(uint32_t old, uint32_t spin_ns) {
    if (word_.load(std::memory_order_acquire) != old) return true;
    uint64_t deadline = now_ns() + spin_ns;
    do {
        for (int i = 0; i < 16; ++i) {
            if (word_.load(std::memory_order_acquire) != old) return true;
            relax();
        }
    } while (now_ns() < deadline);
    // Sequentially consistent on both sides: either open() sees us in sleepers_, or we see its new word.
    sleepers_.fetch_add(1);
    while (word_.load() == old) futex(&word_, FUTEX_WAIT_PRIVATE, old);
    sleepers_.fetch_sub(1);
    return false;
}

void Gate::open() {
    word_.fetch_add(1);
    if (sleepers_.load() != 0) futex(&word_, FUTEX_WAKE_PRIVATE, INT_MAX);
}

Pool::Pool(int num_threads, int nice) : num_threads_(num_threads), nice_(nice) {
    for (int i = 0; i < num_threads_; ++i) spin_[i].ns = kMaxSpinNs;
    // Signals are the main thread's business.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    for (int i = 1; i < num_threads_; ++i) {
        Start* start = new Start{this, i};
        if (pthread_create(&threads_[i], nullptr, enter, start) != 0) {
            // Fewer threads give the same results, later.
            delete start;
            num_threads_ = i;
            break;
        }
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    started_ = num_threads_;
}

Pool::~Pool() {
    stopping_ = true;
    start_.open();
    for (int i = 1; i < started_; ++i) pthread_join(threads_[i], nullptr);
}

void* Pool::enter(void* argument) {
    Start start = *static_cast<Start*>(argument);
    delete static_cast<Start*>(argument);
    char name[16];
    snprintf(name, sizeof name, "biphase-cpu-%d", start.thread);
    pthread_setname_np(pthread_self(), name);
    add_nice(start.pool->nice_);
    start.pool->serve(start.thread);
    return nullptr;
}

void Pool::serve(int thread) {
    uint32_t seen = 0;
    for (;;) {
        start_.wait(seen, kStartSpinNs);
        ++seen;
        if (stopping_) return;
        task_(argument_, thread);
        barrier(thread);
    }
}

void Pool::run(Task task, void* argument) {
    if (nice_ != 0) {
        int tid = static_cast<int>(syscall(SYS_gettid));
        if (niced_caller_ != tid) {
            niced_caller_ = tid;
            add_nice(nice_);
        }
    }
    task_ = task;
    argument_ = argument;
    if (num_threads_ > 1) start_.open();
    task(argument, 0);
    barrier(0);
}

void Pool::barrier(int thread) {
    if (num_threads_ == 1) {
        shares_[0].next.store(0, std::memory_order_relaxed);
        return;
    }
    uint32_t word = meet_.word();
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == num_threads_) {
        arrived_.store(0, std::memory_order_relaxed);
        for (int i = 0; i < num_threads_; ++i) shares_[i].next.store(0, std::memory_order_relaxed);
        meet_.open();
        return;
    }
    uint32_t& spin = spin_[thread].ns;
    if (meet_.wait(word, spin)) {
        spin = spin + spin / 8 < kMaxSpinNs ? spin + spin / 8 : kMaxSpinNs;
    } else {
        spin = spin / 2 > kMinSpinNs ? spin / 2 : kMinSpinNs;
    }
}

}  // namespace biphase
