// Threads that help: a job is a number of units, and whoever is awake claims the next one.
//
// The calling thread never waits for a helper to arrive, only for units that a helper claimed. So a helper that sleeps,
// or that the machine does not run, costs nothing, and a child process after fork() simply works alone. Helpers spin
// for a short while, then sleep on a futex.
//
//     state   units (32 bits) | next unit (32 bits)      one fetch_add claims
//
// What a claim refers to stays in place until its unit is done, since the caller cannot leave the job before.
#pragma once

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <mutex>
#include <thread>
#include <vector>

#if defined(__linux__)
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

inline void relax() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

inline void sleep_while(std::atomic<uint32_t>& word, uint32_t value) {
#if defined(__linux__)
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
#else
    if (word.load() == value) std::this_thread::yield();
#endif
}

inline void wake_all(std::atomic<uint32_t>& word) {
#if defined(__linux__)
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE_PRIVATE, 0x7fffffff, nullptr, nullptr, 0);
#else
    (void)word;
#endif
}

// Memory of one thread that grows and is kept; aligned for the widest vector.
class Scratch {
   public:
    float* floats(int64_t count) {
        if (count > size_) {
            std::free(memory_);
            size_ = (count + 15) / 16 * 16;
            memory_ = static_cast<float*>(std::aligned_alloc(64, size_t(size_) * 4));
            if (memory_ == nullptr) std::abort();
        }
        return memory_;
    }
    ~Scratch() { std::free(memory_); }
    Scratch() = default;
    Scratch(const Scratch&) = delete;
    Scratch& operator=(const Scratch&) = delete;

   private:
    float* memory_ = nullptr;
    int64_t size_ = 0;
};

class Pool {
   public:
    using Unit = void (*)(const void* job, int64_t unit, Scratch& scratch);
    static constexpr int64_t MOST_UNITS = 1 << 30;

    // ``cpus``: the core that each helper stays on, or null. The caller stays free: it does other work between two tapes.
    Pool(int threads, const int* cpus) : scratch_(size_t(threads)) {
        for (int i = 1; i < threads; ++i) {
            helpers_.emplace_back([this, i] { help(scratch_[size_t(i)]); });
            if (cpus != nullptr && pin(helpers_.back(), cpus[i])) ++pinned_;
        }
    }

    ~Pool() {
        stop_.store(true);
        number_.fetch_add(1);
        wake_all(number_);
        for (std::thread& helper : helpers_) helper.join();
    }

    int threads() const { return int(scratch_.size()); }
    int pinned() const { return pinned_; }
    std::mutex& mutex() { return mutex_; }
    Scratch& shared() { return shared_; }  // of the caller: what one job leaves for the next

    // Runs every unit of ``job`` once and returns when all are done. ``alone``: too little work to wake anybody.
    void run(Unit unit, const void* job, int64_t units, bool alone) {
        if (alone || units < 2 || helpers_.empty()) {
            for (int64_t i = 0; i < units; ++i) unit(job, i, scratch_[0]);
            return;
        }
        for (int64_t first = 0; first < units; first += MOST_UNITS)
            share(unit, job, first, units - first < MOST_UNITS ? units - first : MOST_UNITS);
    }

   private:
    static constexpr int SPINS = 400;  // of some 40 to 140 cycles each

    static bool pin(std::thread& helper, int cpu) {
#if defined(__linux__)
        cpu_set_t* set = CPU_ALLOC(size_t(cpu) + 1);
        if (set == nullptr) return false;
        const size_t size = CPU_ALLOC_SIZE(size_t(cpu) + 1);
        CPU_ZERO_S(size, set);
        CPU_SET_S(size_t(cpu), size, set);
        const bool done = pthread_setaffinity_np(helper.native_handle(), size, set) == 0;
        CPU_FREE(set);
        return done;
#else
        return (void)helper, (void)cpu, false;
#endif
    }

    void share(Unit unit, const void* job, int64_t first, int64_t units) {
        unit_ = unit;
        job_ = job;
        first_ = first;
        done_.store(0, std::memory_order_relaxed);
        uint32_t number = number_.load(std::memory_order_relaxed) + 1;
        state_.store(uint64_t(units) << 32, std::memory_order_release);
        number_.store(number, std::memory_order_seq_cst);
        if (sleepers_.load(std::memory_order_seq_cst) > 0) wake_all(number_);
        work(scratch_[0]);
        for (int spin = 0; done_.load(std::memory_order_acquire) != uint32_t(units); ++spin) {
            if (spin < SPINS) {
                relax();
                continue;
            }
            uint32_t done = done_.load(std::memory_order_acquire);
            waiting_.store(1, std::memory_order_seq_cst);
            if (done_.load(std::memory_order_seq_cst) == done && done != uint32_t(units)) sleep_while(done_, done);
            waiting_.store(0, std::memory_order_relaxed);
        }
    }

    void work(Scratch& scratch) {
        for (;;) {
            uint64_t claim = state_.fetch_add(1, std::memory_order_acq_rel);
            uint64_t units = claim >> 32, index = claim & 0xffffffff;
            if (index >= units) return;
            unit_(job_, first_ + int64_t(index), scratch);
            done_.fetch_add(1, std::memory_order_seq_cst);
            if (waiting_.load(std::memory_order_seq_cst)) wake_all(done_);
        }
    }

    void help(Scratch& scratch) {
        uint32_t seen = 0;
        for (;;) {
            uint32_t number = number_.load(std::memory_order_acquire);
            for (int spin = 0; number == seen && spin < SPINS; ++spin) {
                relax();
                number = number_.load(std::memory_order_acquire);
            }
            if (number == seen) {
                sleepers_.fetch_add(1, std::memory_order_seq_cst);
                if (number_.load(std::memory_order_seq_cst) == seen) sleep_while(number_, seen);
                sleepers_.fetch_sub(1, std::memory_order_seq_cst);
                continue;
            }
            if (stop_.load()) return;
            seen = number;
            work(scratch);
        }
    }

    std::vector<Scratch> scratch_;
    Scratch shared_;
    std::mutex mutex_;  // one tape at a time
    Unit unit_ = nullptr;
    const void* job_ = nullptr;
    int64_t first_ = 0;
    int pinned_ = 0;
    std::atomic<bool> stop_{false};
    alignas(64) std::atomic<uint64_t> state_{0};
    alignas(64) std::atomic<uint32_t> done_{0};
    std::atomic<uint32_t> waiting_{0};
    alignas(64) std::atomic<uint32_t> number_{0};
    std::atomic<uint32_t> sleepers_{0};
    std::vector<std::thread> helpers_;  // last, so that they start when everything else exists
};
