// Linear layers over quantised weights on matrix tiles of bf16 (AMX), where the processor has them, at the precision of fp32.
//
// An fp32 number is the sum of three bf16 to the last bit (8 + 8 + 8 bits of it), and a weight of 4 or 8 bits is a bf16 as it
// is. So the products of one group of 32 weights are exact, and a tile adds them up in fp32. By groups, ascending, from +0:
//
//     out[r][n] = fma(m[n], s[r], fma(d[n], q[r][n], out[r][n]))
//     q = (low + mid) + high    each the sum of 32 products of one part of x[r], in the order of the tile instruction
//     s = sum of x[r] over the group, in one order
//
// The instruction adds even and odd elements of a row of its own, k = 0..15 and 16..31, by fused multiply-adds in order, then
// the two, then that to the tile; each step rounded to nearest with subnormals taken for zero. What it does for one row does
// not depend on the others, so neither do a row's bytes. Many rows have one instruction for each part and 16 rows, which adds
// to the same tile; few rows lie with their parts below one another in a single tile and are added up afterwards in
// registers, which gives the same bits under the same rounding (MXCSR, see Rounding).
//
// Weights lie in panels of 16 outputs, by groups of 32 k. Element 2 n + h of line j of a tile of weights is k = j + 16 h of
// output n; nibbles are stored so that four lines come from 64 bytes by shifts:
//
//     Q8_0   d[16] as fp16, then [16 lines][2][16] int8: h, n                                  w = d q
//     Q4_0   d[16] as fp16, then [4][32 elements] 16 bits: nibble i of line 4 l + i            w = d (q - 8)
//     Q4_1   d[16], m[16] as fp16, then the same                                               w = d (q - 8) + (m + 8 d)
#pragma once

#include "product.h"

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__linux__)
#define HAS_TILES 1
#endif
// LOCKSTEP_EMULATED_TILES is for tests on processors without them.
#if LANES_AVX512 && (HAS_TILES || defined(LOCKSTEP_EMULATED_TILES)) && !defined(LOCKSTEP_NO_TILES)
#define MATRIX_TILES 1

#ifdef LOCKSTEP_EMULATED_TILES

INLINE bool tiles_permitted() { return true; }

struct EmulatedTiles {
    alignas(64) uint8_t lines[8][1024];
    int count[8];
};
static thread_local EmulatedTiles emulated;

template <int T>
INLINE void tile_load(const void* lines) {
    std::memcpy(emulated.lines[T], lines, size_t(emulated.count[T]) * 64);
}
template <int T>
INLINE void tile_store(void* lines) {
    std::memcpy(lines, emulated.lines[T], size_t(emulated.count[T]) * 64);
}
template <int T>
INLINE void tile_zero() {
    std::memset(emulated.lines[T], 0, sizeof emulated.lines[T]);
}
// What the instruction was found to do, see above.
template <int SUM, int X, int W>
INLINE void tile_dot() {
    const unsigned before = _mm_getcsr();
    _mm_setcsr((before & ~0x6000u) | 0x8040);  // to nearest, subnormals are zero
    for (int m = 0; m < emulated.count[X]; ++m) {
        const uint16_t* x = reinterpret_cast<const uint16_t*>(emulated.lines[X]) + m * 32;
        __m512 even = _mm512_setzero_ps(), odd = _mm512_setzero_ps();
        for (int k = 0; k < 16; ++k) {
            const __m512i w = _mm512_load_si512(emulated.lines[W] + k * 64);
            const __m512 low = _mm512_castsi512_ps(_mm512_slli_epi32(w, 16));
            const __m512 high = _mm512_castsi512_ps(_mm512_and_si512(w, _mm512_set1_epi32(int(0xffff0000))));
            even = _mm512_fmadd_ps(_mm512_set1_ps(bits_to_float(uint32_t(x[2 * k]) << 16)), low, even);
            odd = _mm512_fmadd_ps(_mm512_set1_ps(bits_to_float(uint32_t(x[2 * k + 1]) << 16)), high, odd);
        }
        float* sum = reinterpret_cast<float*>(emulated.lines[SUM]) + m * 16;
        _mm512_store_ps(sum, _mm512_add_ps(_mm512_load_ps(sum), _mm512_add_ps(even, odd)));
    }
    _mm_setcsr(before);
}
INLINE void tile_shapes(const void*, const uint8_t* lines) {
    for (int i = 0; i < 8; ++i) emulated.count[i] = lines[i];
}
INLINE void tile_release() {}

#else
#include <sys/syscall.h>
#include <unistd.h>

// Tiles are 16 kB of state that Linux gives to a process that asks for it.
INLINE bool tiles_permitted() {
    constexpr long REQUEST = 0x1023, TILE_DATA = 18;
    return syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
}

// The instructions. Those of the compiler's header do not say which memory they read and write.
template <int T>
INLINE void tile_load(const void* lines) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(lines), "r"(int64_t(64)), "n"(T) : "memory");
}
template <int T>
INLINE void tile_store(void* lines) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(lines), "r"(int64_t(64)), "n"(T) : "memory");
}
template <int T>
INLINE void tile_zero() {
    asm volatile("tilezero %%tmm%c0" ::"n"(T));
}
template <int SUM, int X, int W>
INLINE void tile_dot() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"n"(SUM), "n"(X), "n"(W));
}
INLINE void tile_shapes(const void* shapes, const uint8_t*) { asm volatile("ldtilecfg (%0)" ::"r"(shapes) : "memory"); }
INLINE void tile_release() { asm volatile("tilerelease"); }

#endif

constexpr int LINES = 16, LINE = 32;      // of a tile; elements of a line
constexpr int64_t TILE_ELEMENTS = LINES * LINE, PARTS = 3;
constexpr int64_t FEW = LINES / PARTS;    // rows whose parts fit one tile
constexpr int FEW_PANELS = 4, PAIR = 2;   // panels that a unit works on, of few rows and of many
constexpr int64_t CHUNK = 8;              // tiles of rows that a unit works on: their parts stay in the second-level cache

// Shapes of all tiles while it lives: those of weights, WEIGHTS and above, have 16 lines, the others ``lines``.
template <int WEIGHTS>
class Shapes {
   public:
    explicit Shapes(int lines) {
        struct alignas(64) {
            uint8_t palette, start, reserved[14];
            uint16_t bytes[16];
            uint8_t lines[16];
        } shapes = {};
        shapes.palette = 1;
        for (int i = 0; i < 8; ++i) {
            shapes.bytes[i] = 64;
            shapes.lines[i] = uint8_t(i < WEIGHTS ? lines : LINES);
        }
        tile_shapes(&shapes, shapes.lines);
    }
    ~Shapes() { tile_release(); }
    Shapes(const Shapes&) = delete;
    Shapes& operator=(const Shapes&) = delete;
};

// Vector instructions round as tiles do while it lives: subnormals are zero, as operands and as results.
class Rounding {
   public:
    Rounding() : before_(_mm_getcsr()) { _mm_setcsr(before_ | 0x8040); }
    ~Rounding() { _mm_setcsr(before_); }
    Rounding(const Rounding&) = delete;
    Rounding& operator=(const Rounding&) = delete;

   private:
    unsigned before_;
};

// Weight types. ``spread`` makes the tile of a group, ``value`` is element k of an output as the file means it.

alignas(64) constexpr uint16_t AROUND_ZERO[LINE] = {  // -8 .. 7 as bf16, twice
    0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80, 0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0,
    0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80, 0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0,
};

struct Nibbles {
    static constexpr int64_t CODES = 256;
    INLINE void spread(const uint8_t* codes, uint16_t* tile) {
        const __m512i numbers = _mm512_load_si512(AROUND_ZERO);
        for (int l = 0; l < 4; ++l, tile += 4 * LINE) {
            const __m512i four = _mm512_loadu_si512(codes + 64 * l);  // the permutation looks at five bits, of which one is idle
            _mm512_store_si512(tile, _mm512_permutexvar_epi16(four, numbers));
            _mm512_store_si512(tile + LINE, _mm512_permutexvar_epi16(_mm512_srli_epi16(four, 4), numbers));
            _mm512_store_si512(tile + 2 * LINE, _mm512_permutexvar_epi16(_mm512_srli_epi16(four, 8), numbers));
            _mm512_store_si512(tile + 3 * LINE, _mm512_permutexvar_epi16(_mm512_srli_epi16(four, 12), numbers));
        }
    }
    INLINE int code(const uint8_t* codes, int64_t n, int64_t k) {
        const int64_t line = k % LINES, element = 2 * n + k / LINES;
        return (codes[line / 4 * 64 + element * 2 + line % 4 / 2] >> (line % 2 * 4)) & 15;
    }
    INLINE void set(uint8_t* codes, int64_t n, int64_t k, const uint8_t* q) {
        const int64_t line = k % LINES, element = 2 * n + k / LINES;
        const int value = k < 16 ? q[k] & 15 : q[k - 16] >> 4;
        codes[line / 4 * 64 + element * 2 + line % 4 / 2] |= uint8_t(value << (line % 2 * 4));
    }
};

struct Tiles4_0 : Nibbles {
    static constexpr int64_t HEAD = 32, BYTES = HEAD + CODES;
    static constexpr bool MINIMUM = false;
    INLINE float value(const uint8_t* group, int64_t n, int64_t k, float d, float) {
        return d * float(code(group + HEAD, n, k) - 8);
    }
};

struct Tiles4_1 : Nibbles {
    static constexpr int64_t HEAD = 64, BYTES = HEAD + CODES;
    static constexpr bool MINIMUM = true;
    INLINE float value(const uint8_t* group, int64_t n, int64_t k, float d, float m) {
        return std::fma(d, float(code(group + HEAD, n, k)), m);
    }
};

struct Tiles8_0 {
    static constexpr int64_t CODES = 512, HEAD = 32, BYTES = HEAD + CODES;
    static constexpr bool MINIMUM = false;
    INLINE void spread(const uint8_t* codes, uint16_t* tile) {
        for (int line = 0; line < LINES; ++line, codes += LINE, tile += LINE) {
            const __m512i low = _mm512_castps_si512(from_int8(codes).v), high = _mm512_castps_si512(from_int8(codes + LANES).v);
            _mm512_store_si512(tile, _mm512_mask_blend_epi16(0xaaaaaaaa, _mm512_srli_epi32(low, 16), high));
        }
    }
    INLINE void set(uint8_t* codes, int64_t n, int64_t k, const uint8_t* q) {
        codes[k % LINES * LINE + k / LINES * LANES + n] = q[k];
    }
    INLINE float value(const uint8_t* group, int64_t n, int64_t k, float d, float) {
        return d * float(int8_t(group[HEAD + k % LINES * LINE + k / LINES * LANES + n]));
    }
};

template <class T>
INLINE void scales_of(const uint8_t* group, V16& d, V16& m) {
    d = from_half(group);
    m = T::MINIMUM ? fma(d, set16(8.0f), from_half(group + 32)) : zero16();
}

// Row ``n`` of a weight as it was in the file, from its panel.
template <class T>
void tiles_row(const uint8_t* panel, int64_t n, int64_t k, float* out) {
    for (int64_t g = 0; g < k / LINE; ++g, panel += T::BYTES) {
        uint16_t d, m = 0;
        std::memcpy(&d, panel + 2 * n, 2);
        if (T::MINIMUM) std::memcpy(&m, panel + 32 + 2 * n, 2);
        for (int64_t i = 0; i < LINE; ++i) out[g * LINE + i] = T::value(panel, n, i, half_to_float(d), half_to_float(m));
    }
}

// From rows of the file: fp16 scales, then 16 bytes of nibbles (k low, k + 16 high) or 32 int8. Rows beyond n are zero.
template <class T>
void pack_tiles(const uint8_t* src, int64_t n, int64_t k, uint8_t* out) {
    const int64_t groups = k / LINE, halves = T::HEAD / 32, from = 2 * halves + T::CODES / LANES;
    std::memset(out, 0, size_t((n + LANES - 1) / LANES * groups * T::BYTES));
    for (int64_t row = 0; row < n; ++row)
        for (int64_t g = 0; g < groups; ++g, src += from) {
            uint8_t* group = out + (row / LANES * groups + g) * T::BYTES;
            for (int64_t h = 0; h < halves; ++h) std::memcpy(group + 32 * h + 2 * (row % LANES), src + 2 * h, 2);
            for (int64_t i = 0; i < LINE; ++i) T::set(group + T::HEAD, row % LANES, i, src + 2 * halves);
        }
}

// Activations in parts ------------------------------------------------------------------------------------------------

// Tiles of ``height`` rows, of each chunk of tiles by groups: parts [PARTS: low, mid, high][height][32], sums [height].
struct Parts {
    uint16_t* parts;
    float* sums;
    int64_t rows, groups, height, tiles;

    int64_t place(int64_t tile, int64_t group) const {
        const int64_t first = tile / CHUNK * CHUNK;
        return first * groups + group * (tiles - first < CHUNK ? tiles - first : CHUNK) + tile - first;
    }
    uint16_t* part(int64_t tile, int64_t group) const { return parts + place(tile, group) * PARTS * height * LINE; }
    float* sum(int64_t tile, int64_t group) const { return sums + place(tile, group) * height; }
};

INLINE Parts parts_of(const Linear& a) {
    const int64_t height = a.rows <= FEW ? a.rows : LINES, tiles = (a.rows + height - 1) / height;
    return {nullptr, nullptr, a.rows, a.k / LINE, height, tiles};
}

// Memory that they need; ``settle`` says where in it they are.
INLINE int64_t parts_floats(const Parts& p) { return p.tiles * p.groups * p.height * (PARTS * LINE / 2 + 1); }
INLINE void settle(Parts& p, float* memory) {
    p.parts = reinterpret_cast<uint16_t*>(memory);
    p.sums = memory + p.tiles * p.groups * p.height * (PARTS * LINE / 2);
}

INLINE void store_tops(uint16_t* line, __m512 first, __m512 second) {
    const __m512i low = _mm512_srli_epi32(_mm512_castps_si512(first), 16);
    _mm512_store_si512(line, _mm512_mask_blend_epi16(0xaaaaaaaa, low, _mm512_castps_si512(second)));
}

INLINE __m512 without_top(__m512 x) {  // exact
    return _mm512_sub_ps(x, _mm512_and_ps(x, _mm512_castsi512_ps(_mm512_set1_epi32(int(0xffff0000)))));
}

// One tile of rows, all groups; rows beyond the last are zero.
INLINE void split_tile(const Linear& a, const Parts& p, int64_t tile) {
    const int64_t part = p.height * LINE, first_row = tile * p.height;
    for (int64_t g = 0; g < p.groups; ++g) {
        uint16_t* line = p.part(tile, g);
        float* sums = p.sum(tile, g);
        for (int64_t r = 0; r < p.height; ++r, line += LINE) {
            __m512 first = _mm512_setzero_ps(), second = first;
            if (first_row + r < p.rows) {
                const float* x = a.x + (first_row + r) * a.ldx + g * LINE;
                first = _mm512_loadu_ps(x), second = _mm512_loadu_ps(x + LANES);
            }
            sums[r] = sum_lanes({_mm512_add_ps(first, second)});
            for (int64_t i = PARTS - 1; i >= 0; --i, first = without_top(first), second = without_top(second))
                store_tops(line + i * part, first, second);
        }
    }
}

// Few rows ------------------------------------------------------------------------------------------------------------

constexpr int64_t AHEAD = 12;  // groups whose weights are asked for before they are needed

template <class T>
INLINE void ask_for(const uint8_t* codes) {
    for (int64_t at = 0; at < T::BYTES; at += 64) __builtin_prefetch(codes + AHEAD * T::BYTES + at, 0, 3);
}

// One panel: what its tile of weights gives, and the next group's tile. The tile of activations is 0.
template <class T, int SUM, int W>
INLINE void dot_few(const uint16_t* now, float* sums, const uint8_t* codes, uint16_t* next) {
    tile_load<W>(now), tile_zero<SUM>(), tile_dot<SUM, 0, W>();
    ask_for<T>(codes);
    T::spread(codes, next);
    tile_store<SUM>(sums);
}

template <class T, int R, int P>
INLINE void scale_few(const uint8_t* w, int64_t panel, const float* totals, const float (*sums)[LINES * LANES],
                      V16 (&acc)[R][P]) {
    for (int p = 0; p < P; ++p) {
        V16 d, m;
        scales_of<T>(w + p * panel, d, m);
        for (int r = 0; r < R; ++r) {
            const float *low = sums[p] + r * LANES, *mid = low + R * LANES, *high = mid + R * LANES;
            acc[r][p] = fma(add(add(load16(low), load16(mid)), load16(high)), d, acc[r][p]);
            if (T::MINIMUM) acc[r][p] = fma(m, set16(totals[r]), acc[r][p]);
        }
    }
}

// R rows times P panels. Tiles of weights are made one group ahead and sums used one group later: what is stored and loaded
// at once waits for the cache.
template <class T, int R, int P>
void multiply_few(const Parts& x, const uint8_t* w, int64_t panel, const Out& out) {
    alignas(64) uint16_t tiles[2][P][TILE_ELEMENTS];
    alignas(64) float sums[2][P][LINES * LANES];
    V16 acc[R][P];
    begin(acc, out);
    for (int p = 0; p < P; ++p) T::spread(w + p * panel + T::HEAD, tiles[0][p]);
    for (int64_t g = 0; g < x.groups; ++g) {
        const int64_t turn = g & 1, next = g + 1 < x.groups ? g + 1 : g;
        const uint8_t* codes = w + next * T::BYTES + T::HEAD;
        tile_load<0>(x.part(0, g));
        dot_few<T, 1, 5>(tiles[turn][0], sums[turn][0], codes, tiles[turn ^ 1][0]);
        if constexpr (P == FEW_PANELS) {
            dot_few<T, 2, 6>(tiles[turn][1], sums[turn][1], codes + panel, tiles[turn ^ 1][1]);
            dot_few<T, 3, 7>(tiles[turn][2], sums[turn][2], codes + 2 * panel, tiles[turn ^ 1][2]);
            dot_few<T, 4, 5>(tiles[turn][3], sums[turn][3], codes + 3 * panel, tiles[turn ^ 1][3]);
        }
        if (g > 0) scale_few<T, R, P>(w + (g - 1) * T::BYTES, panel, x.sum(0, g - 1), sums[turn ^ 1], acc);
    }
    const int64_t last = x.groups - 1;
    scale_few<T, R, P>(w + last * T::BYTES, panel, x.sum(0, last), sums[last & 1], acc);
    finish(acc, out);
}

template <class T, int P>
INLINE void multiply_few_rows(const Parts& x, const uint8_t* w, int64_t panel, const Out& out) {
    static_assert(FEW == 5);
    switch (x.rows) {
        case 1: return multiply_few<T, 1, P>(x, w, panel, out);
        case 2: return multiply_few<T, 2, P>(x, w, panel, out);
        case 3: return multiply_few<T, 3, P>(x, w, panel, out);
        case 4: return multiply_few<T, 4, P>(x, w, panel, out);
        case 5: return multiply_few<T, 5, P>(x, w, panel, out);
    }
}

// Many rows -----------------------------------------------------------------------------------------------------------

// Tiles of activations are 0 and 1, sums SUM and SUM + 1, weights 6 and 7.
template <int P, int SUM>
INLINE void dot_tile(const uint16_t* x, float (*sums)[LINES * LANES]) {
    static_assert(P <= PAIR);
    constexpr int SECOND = SUM + P - 1;
    tile_load<0>(x);
    tile_load<1>(x + TILE_ELEMENTS);
    tile_zero<SUM>(), tile_dot<SUM, 0, 6>();
    if constexpr (P > 1) tile_zero<SECOND>(), tile_dot<SECOND, 0, 7>();
    tile_load<0>(x + 2 * TILE_ELEMENTS);
    tile_dot<SUM, 1, 6>();
    if constexpr (P > 1) tile_dot<SECOND, 1, 7>();
    tile_dot<SUM, 0, 6>();
    if constexpr (P > 1) tile_dot<SECOND, 0, 7>();
    tile_store<SUM>(sums[0]);
    if constexpr (P > 1) tile_store<SECOND>(sums[1]);
}

template <class T, int P>
INLINE void scale_tile(const float* totals, const float (*sums)[LINES * LANES], const V16* d, const V16* m, float* acc) {
#pragma GCC unroll 4
    for (int r = 0; r < LINES; ++r) {
        const V16 total = T::MINIMUM ? set16(totals[r]) : zero16();
        for (int p = 0; p < P; ++p, acc += LANES) {
            V16 sum = fma(load16(sums[p] + r * LANES), d[p], load16(acc));
            if (T::MINIMUM) sum = fma(m[p], total, sum);
            store16(acc, sum);
        }
    }
}

// ``count`` tiles of rows from ``first`` on, a chunk's, times P panels. A group's tiles of weights are made while the group
// before is multiplied, and a tile's sums are scaled while the next tile is. ``acc`` has room for [count][16][P][16].
template <class T, int P>
void multiply_chunk(const Parts& x, int64_t first, int64_t count, const uint8_t* w, int64_t panel, float* acc) {
    alignas(64) uint16_t tiles[2][P][TILE_ELEMENTS];
    alignas(64) float sums[2][P][LINES * LANES];
    constexpr int64_t SIZE = LINES * P * LANES;
    std::memset(acc, 0, size_t(count * SIZE) * 4);
    for (int p = 0; p < P; ++p) T::spread(w + p * panel + T::HEAD, tiles[0][p]);
    const uint16_t* parts = x.part(first, 0);  // tile by tile, group by group
    const float* totals = x.sum(first, 0);
    int64_t step = 0;
    auto dot = [&]() {
        if (step & 1)
            dot_tile<P, 2>(parts, sums[1]);
        else
            dot_tile<P, 4>(parts, sums[0]);
        ++step, parts += PARTS * TILE_ELEMENTS;
    };
    V16 d[P], m[P];
    auto scale = [&](int64_t tile) {  // the one before the last that was multiplied
        scale_tile<T, P>(totals, sums[step & 1], d, m, acc + tile * SIZE);
        totals += LINES;
    };
    for (int64_t g = 0; g < x.groups; ++g, w += T::BYTES) {
        tile_load<6>(tiles[g & 1][0]);
        if constexpr (P > 1) tile_load<7>(tiles[g & 1][1]);
        dot();
        if (g + 1 < x.groups)
            for (int p = 0; p < P; ++p) T::spread(w + p * panel + T::BYTES + T::HEAD, tiles[(g + 1) & 1][p]);
        if (g > 0) scale(count - 1);
        for (int p = 0; p < P; ++p) scales_of<T>(w + p * panel, d[p], m[p]);
        for (int64_t t = 1; t < count; ++t) {
            dot();
            scale(t - 1);
        }
    }
    ++step;
    scale(count - 1);
}

// Units: chunks of rows, each times all panels, FEW_PANELS or PAIR at a time.
INLINE int64_t tiles_panels(const Parts& x) { return x.rows <= FEW ? FEW_PANELS : PAIR; }
INLINE int64_t tiles_per_chunk(int64_t n, const Parts& x) {
    return ((n + LANES - 1) / LANES + tiles_panels(x) - 1) / tiles_panels(x);
}
INLINE int64_t tiles_units(int64_t n, const Parts& x) { return tiles_per_chunk(n, x) * ((x.tiles + CHUNK - 1) / CHUNK); }

// What a unit computes: rows from, panels from.
struct Place {
    int64_t row, rows, panel, panels;
};
INLINE Place tiles_place(const Linear& a, const Parts& x, int64_t unit) {
    const int64_t per = tiles_per_chunk(a.n, x), most = tiles_panels(x), panels = (a.n + LANES - 1) / LANES;
    const int64_t row = unit / per * CHUNK * x.height, panel = unit % per * most;
    const int64_t rows = CHUNK * x.height;
    return {row, a.rows - row < rows ? a.rows - row : rows, panel, panels - panel < most ? panels - panel : most};
}

template <class T>
void tiles_few(const Linear& a, const Parts& x, const Place& at, const uint8_t* w, int64_t panel) {
    Shapes<5> shapes(int(PARTS * x.rows));
    float* out = a.out + at.panel * LANES;
    const int64_t n = a.n - at.panel * LANES;
    if (at.panels == FEW_PANELS) {
        const Out four{out, a.ldo, n - (FEW_PANELS - 1) * LANES, true};
        return multiply_few_rows<T, FEW_PANELS>(x, w, panel, four);
    }
    for (int64_t p = 0; p < at.panels; ++p)
        multiply_few_rows<T, 1>(x, w + p * panel, panel, {out + p * LANES, a.ldo, n - p * LANES, true});
}

template <class T, int P>
void tiles_many(const Linear& a, const Parts& x, const Place& at, const uint8_t* w, int64_t panel, float* acc) {
    Shapes<6> shapes(LINES);
    multiply_chunk<T, P>(x, at.row / LINES, (at.rows + LINES - 1) / LINES, w, panel, acc);
    const int64_t n = a.n - at.panel * LANES;
    for (int64_t r = 0; r < at.rows; ++r)
        for (int64_t p = 0; p < P; ++p, acc += LANES)
            store16(a.out + (at.row + r) * a.ldo + (at.panel + p) * LANES, load16(acc), n - p * LANES);
}

template <class T>
void linear_tiles(const Linear& a, const Parts& x, int64_t unit, Scratch& scratch) {
    const Rounding rounding;
    const Place at = tiles_place(a, x, unit);
    const int64_t panel = x.groups * T::BYTES;
    const uint8_t* w = a.w + at.panel * panel;
    if (x.rows <= FEW)
        tiles_few<T>(a, x, at, w, panel);
    else if (at.panels == PAIR)
        tiles_many<T, PAIR>(a, x, at, w, panel, scratch.floats(CHUNK * LINES * PAIR * LANES));
    else
        tiles_many<T, 1>(a, x, at, w, panel, scratch.floats(CHUNK * LINES * LANES));
    const int64_t width = at.panels * LANES, n = a.n - at.panel * LANES;
    add_bias(a.bias, at.rows, at.panel * LANES, n < width ? n : width, a.out + at.row * a.ldo, a.ldo);
}

#endif
