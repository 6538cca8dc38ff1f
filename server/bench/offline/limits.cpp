// What this machine can do at most: reading memory and multiplying, each on a number of threads.
//
//     limits THREADS BYTES...    prints {"gflop_s": x, "read_gb_s": [one for each size]}
//
// Reading: every thread sums its own part of a buffer of that size, four streams at once; the best of several passes. What
// fits the last cache is read from it, as a model of that size would be. Multiplying: independent chains of fused
// multiply-adds in registers.

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <thread>
#include <vector>

#if defined(__linux__)
#include <pthread.h>
#include <sched.h>
#endif

#if defined(__AVX512F__)
constexpr int BYTES = 64;
#elif defined(__AVX__)
constexpr int BYTES = 32;
#else
constexpr int BYTES = 16;
#endif
typedef float Vector __attribute__((vector_size(BYTES)));
constexpr int LANES = BYTES / 4;
constexpr int CHAINS = 12;
constexpr int64_t ROUNDS = 4000000;

static double seconds(const std::function<void()>& work) {
    const auto begin = std::chrono::steady_clock::now();
    work();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

// On the i-th of the cores that this process may use, where there is one.
static void stay(int i) {
#if defined(__linux__)
    static const cpu_set_t granted = [] {
        cpu_set_t set;
        CPU_ZERO(&set);
        sched_getaffinity(0, sizeof set, &set);
        return set;
    }();
    for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
        if (!CPU_ISSET(cpu, &granted) || i-- > 0) continue;
        cpu_set_t one;
        CPU_ZERO(&one);
        CPU_SET(cpu, &one);
        pthread_setaffinity_np(pthread_self(), sizeof one, &one);
        return;
    }
#else
    (void)i;
#endif
}

static void on_threads(int threads, const std::function<void(int)>& work) {
    std::vector<std::thread> others;
    for (int i = 1; i < threads; ++i) others.emplace_back([&work, i] { stay(i), work(i); });
    stay(0);
    work(0);
    for (auto& other : others) other.join();
}

static volatile float sink;

static float read(const Vector* from, int64_t count) {
    Vector sums[8] = {};
    const int64_t quarter = count / 4;
    for (int64_t i = 0; i + 2 <= quarter; i += 2) {
        for (int s = 0; s < 4; ++s) {
            const Vector* at = from + s * quarter + i;
            __builtin_prefetch(at + 16);
            sums[2 * s] += at[0];
            sums[2 * s + 1] += at[1];
        }
    }
    float total = 0;
    for (const Vector& sum : sums) total += sum[0];
    return total;
}

// Nothing in the loop may go to memory: chains that the compiler leaves on the stack run at a third of the speed.
static float multiply(float seed) {
    Vector chains[CHAINS], a = {}, b = {};
    for (int i = 0; i < LANES; ++i) a[i] = 0.999f + seed, b[i] = 1e-3f;
    for (int c = 0; c < CHAINS; ++c) chains[c] = a + static_cast<float>(c);
    for (int64_t i = 0; i < ROUNDS; ++i) {
#pragma GCC unroll 16
        for (int c = 0; c < CHAINS; ++c) chains[c] = chains[c] * a + b;
    }
    float total = 0;
    for (const Vector& chain : chains) total += chain[0];
    return total;
}

int main(int argc, char** argv) {
    if (argc < 2) return 2;
    const int threads = std::max(1, atoi(argv[1]));
    double best = 1e9;
    for (int pass = 0; pass < 5; ++pass)
        best = std::min(best, seconds([&] { on_threads(threads, [&](int i) { sink = multiply(i * 1e-9f); }); }));
    printf("{\"gflop_s\": %.1f, \"read_gb_s\": [", 2e-9 * threads * CHAINS * LANES * ROUNDS / best);
    for (int argument = 2; argument < argc; ++argument) {
        const int64_t part = strtoll(argv[argument], nullptr, 10) / BYTES / threads;
        Vector* buffer = static_cast<Vector*>(aligned_alloc(64, std::max<int64_t>(part, 1) * threads * BYTES));
        if (buffer == nullptr) return 1;
        on_threads(threads, [&](int i) { for (int64_t k = 0; k < part; ++k) buffer[i * part + k] = Vector{} + 1.0f; });
        best = 1e9;
        for (int pass = 0; pass < 7; ++pass)
            best = std::min(best, seconds([&] { on_threads(threads, [&](int i) { sink = read(buffer + i * part, part); }); }));
        printf("%s%.2f", argument > 2 ? ", " : "", 1e-9 * part * threads * BYTES / best);
        free(buffer);
    }
    printf("]}\n");
}
