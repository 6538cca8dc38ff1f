// What this machine can do at most: reading memory and multiplying, each on the engine's own pool of threads.
//
//     limits THREADS BYTES...    prints {"gflop_s": x, "tile_gflop_s": y, "read_gb_s": [one for each size]}
//
// Each number is the fastest of several ways and repetitions, since it is used as a bound: one way may suit a machine badly,
// and others on the machine can only slow it down. Threads stay on no core, where somebody else may be.
//
// Reading: a buffer of that size is summed, in pages of both sizes, in units of two sizes that threads claim one by one,
// two to eight streams in each, with and without asking ahead. What fits the last cache is read from it, as a model of that
// size would be. Multiplying: independent chains of fused multiply-adds in registers, several numbers of them. Tiles, where
// the engine uses them: dot products of bf16 on four sums; 0 elsewhere.

#include "pool.h"
#include "tiles.h"

#include <algorithm>
#include <chrono>
#include <cstdio>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#if defined(__AVX512F__)
constexpr int BYTES = 64;
#elif defined(__AVX__)
constexpr int BYTES = 32;
#else
constexpr int BYTES = 16;
#endif
typedef float Vector __attribute__((vector_size(BYTES)));
constexpr int WIDTH = BYTES / 4;
constexpr int64_t ROUNDS = 400000;
constexpr int READS = 2, MULTIPLIES = 5;  // repetitions of each way

static volatile float sink;

template <class Work>
static double seconds(const Work& work) {
    const auto begin = std::chrono::steady_clock::now();
    work();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

struct Buffer {
    const Vector* from;
    int64_t count, unit;  // vectors
};

template <int STREAMS, bool AHEAD>
static void read(const void* job, int64_t unit, Scratch&) {
    const Buffer& a = *static_cast<const Buffer*>(job);
    const Vector* from = a.from + unit * a.unit;
    const int64_t part = std::min(a.unit, a.count - unit * a.unit) / STREAMS;
    Vector sums[2 * STREAMS] = {};
    for (int64_t i = 0; i + 2 <= part; i += 2)
#pragma GCC unroll 8
        for (int s = 0; s < STREAMS; ++s) {
            const Vector* at = from + s * part + i;
            if (AHEAD) __builtin_prefetch(at + 1024 / BYTES);
            sums[2 * s] += at[0];
            sums[2 * s + 1] += at[1];
        }
    Vector total = {};
    for (const Vector& sum : sums) total += sum;
    sink = total[0];
}

// Nothing in the loop may go to memory: chains that the compiler leaves on the stack run at a third of the speed.
template <int CHAINS>
static void multiply(const void*, int64_t unit, Scratch&) {
    Vector chains[CHAINS], a = {}, b = {};
    for (int i = 0; i < WIDTH; ++i) a[i] = 0.999f + float(unit) * 1e-9f, b[i] = 1e-3f;
    for (int c = 0; c < CHAINS; ++c) chains[c] = a + static_cast<float>(c);
    for (int64_t i = 0; i < ROUNDS; ++i) {
#pragma GCC unroll 24
        for (int c = 0; c < CHAINS; ++c) chains[c] = chains[c] * a + b;
    }
    Vector total = {};
    for (const Vector& chain : chains) total += chain;
    sink = total[0];
}

#if MATRIX_TILES
static void multiply_tiles(const void*, int64_t, Scratch&) {
    Shapes<4> shapes(LINES);
    tile_zero<0>(), tile_zero<1>(), tile_zero<2>(), tile_zero<3>();
    tile_zero<4>(), tile_zero<5>(), tile_zero<6>(), tile_zero<7>();
    for (int64_t i = 0; i < ROUNDS; ++i) tile_dot<0, 4, 6>(), tile_dot<1, 4, 7>(), tile_dot<2, 5, 6>(), tile_dot<3, 5, 7>();
}
#endif

// Units of multiplying are many more than threads, so that nobody waits long for the last.
static double fastest(Pool& pool, Pool::Unit unit, double flops) {
    const int64_t units = 8 * pool.threads();
    double best = 1e9;
    for (int i = 0; i < MULTIPLIES; ++i) best = std::min(best, seconds([&] { pool.run(unit, nullptr, units, false); }));
    return 1e-9 * double(units) * flops / best;
}

template <int CHAINS>
static double chains(Pool& pool) {
    return fastest(pool, multiply<CHAINS>, 2.0 * CHAINS * WIDTH * ROUNDS);
}

static double tiles(Pool& pool) {
#if MATRIX_TILES
    if (tiles_permitted()) return fastest(pool, multiply_tiles, 4.0 * 2 * LINES * LINES * LINE * ROUNDS);
#endif
    return (void)pool, 0.0;
}

// The fastest of all ways to read ``bytes``, in GB/s; -1 without memory.
static double reading(Pool& pool, int64_t bytes) {
    static constexpr Pool::Unit ways[] = {read<2, false>, read<4, false>, read<8, false>,
                                          read<2, true>,  read<4, true>,  read<8, true>};
    const int64_t count = std::max<int64_t>(bytes / BYTES, 64);
    double best = 1e9;
    for (int large = 0; large < 2; ++large) {
        const size_t size = (size_t(count) * BYTES + 4095) / 4096 * 4096;
        Vector* memory = static_cast<Vector*>(std::aligned_alloc(4096, size));
        if (memory == nullptr) return -1;
#if defined(__linux__)
        madvise(memory, size, large ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
#endif
        std::fill(memory, memory + count, Vector{} + 1.0f);
        for (int64_t unit : {1 << 20, 1 << 24}) {
            const Buffer buffer{memory, count, unit / BYTES};
            for (Pool::Unit way : ways)
                for (int i = 0; i < READS; ++i)
                    best = std::min(best, seconds([&] { pool.run(way, &buffer, (count + buffer.unit - 1) / buffer.unit, false); }));
        }
        std::free(memory);
    }
    return 1e-9 * double(count) * BYTES / best;
}

int main(int argc, char** argv) {
    if (argc < 2) return 2;
    Pool pool(std::max(1, std::atoi(argv[1])), nullptr);
    const double flops = std::max({chains<8>(pool), chains<12>(pool), chains<16>(pool), chains<24>(pool)});
    std::printf("{\"gflop_s\": %.1f, \"tile_gflop_s\": %.1f, \"read_gb_s\": [", flops, tiles(pool));
    for (int argument = 2; argument < argc; ++argument) {
        const double rate = reading(pool, std::strtoll(argv[argument], nullptr, 10));
        if (rate < 0) return 1;
        std::printf("%s%.2f", argument > 2 ? ", " : "", rate);
    }
    std::printf("]}\n");
}
