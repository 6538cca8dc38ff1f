// The one product that everything is made of: out[r][n] = sum over k, ascending, of x[r][k] * w[k][n].
//
// Each output is one chain of fused multiply-adds in one lane, from +0, k by k. Blocking goes over rows and columns only;
// where k is cut, the chain's value is stored and loaded again, which changes no bit. So an output does not know how many
// rows, columns, pieces of k or threads there were.
//
// Weights lie in panels of 16 outputs, k after k, so that one vector holds one k of 16 outputs:
//
//     F32                    [k][16] x 4 bytes
//     BF16, F16              [k][16] x 2 bytes
//     Q8_0, by 32 k          d[16] as fp16, then [32][16] int8                               w = d q
//     Q4_0, by 32 k          d[16] as fp16, then [16][16] bytes: k = 2i low, 2i + 1 high     w = d (q - 8)
//     Q4_1, by 32 k          d[16], m[16] as fp16, then the same                             w = d q + m
//
// d q is exact in fp32 (11 bits times at most 8), so a weight has the bits of the file's own dequantisation.
#pragma once

#include "simd.h"

#if LANES_AVX512
constexpr int ROWS = 8, PANELS = 3, ALONE = 6;  // 24 accumulators; a row alone needs chains to hide the latency
#elif LANES_AVX2
constexpr int ROWS = 6, PANELS = 1, ALONE = 3;
#else
constexpr int ROWS = 4, PANELS = 1, ALONE = 1;
#endif
// Up to this many rows weights are dequantised in registers, beyond it once per tile.
#if LANES_AVX512
constexpr int DIRECT = 8;
#else
constexpr int DIRECT = 4;
#endif
constexpr int64_t K_PIECE = 128;  // k's of one tile that stay in the first-level cache; a multiple of 32
// From this many rows on the sums of a tile have left the caches when the next piece of k needs them, which costs more than
// weights from the second level: pieces are as long as it has room for.
constexpr int64_t MANY = 128, K_LONG = 1536;
// How far ahead of their use weights of few rows are asked for: the hardware does not see so many streams coming.
constexpr int64_t BYTES_AHEAD = 1536;

INLINE void prefetch(const uint8_t* p, int64_t bytes) {
    int64_t byte = 0;
    for (; byte + 256 <= bytes; byte += 256)
        for (int64_t line = 0; line < 256; line += 64) __builtin_prefetch(p + byte + line, 0, 3);
    for (; byte < bytes; byte += 64) __builtin_prefetch(p + byte, 0, 3);
}

// Weight types: a group is what shares scales, ``step`` gives STEP consecutive k's of it.

struct F32 {
    static constexpr int64_t GROUP = 1, BYTES = 64;
    static constexpr int STEP = 1;
    struct Scale {};
    INLINE Scale scale(const uint8_t*) { return {}; }
    INLINE void step(const uint8_t* group, Scale, int64_t, V16* w) { w[0] = load16(reinterpret_cast<const float*>(group)); }
};

struct BF16 {
    static constexpr int64_t GROUP = 1, BYTES = 32;
    static constexpr int STEP = 1;
    struct Scale {};
    INLINE Scale scale(const uint8_t*) { return {}; }
    INLINE void step(const uint8_t* group, Scale, int64_t, V16* w) { w[0] = from_bf16(group); }
};

struct F16 {
    static constexpr int64_t GROUP = 1, BYTES = 32;
    static constexpr int STEP = 1;
    struct Scale {};
    INLINE Scale scale(const uint8_t*) { return {}; }
    INLINE void step(const uint8_t* group, Scale, int64_t, V16* w) { w[0] = from_half(group); }
};

struct Q8_0 {
    static constexpr int64_t GROUP = 32, BYTES = 32 + 512;
    static constexpr int STEP = 2;
    struct Scale {
        V16 d;
    };
    INLINE Scale scale(const uint8_t* group) { return {from_half(group)}; }
    INLINE void step(const uint8_t* group, const Scale& s, int64_t i, V16* w) {
        w[0] = mul(from_int8(group + 32 + 32 * i), s.d);
        w[1] = mul(from_int8(group + 32 + 32 * i + 16), s.d);
    }
};

struct Q4_0 {
    static constexpr int64_t GROUP = 32, BYTES = 32 + 256;
    static constexpr int STEP = 2;
    struct Scale {
        V16 d, m;
    };
    INLINE Scale scale(const uint8_t* group) {
        V16 d = from_half(group);
        return {d, mul(d, set16(-8.0f))};
    }
    INLINE void step(const uint8_t* group, const Scale& s, int64_t i, V16* w) {
        V16 low, high;
        from_nibbles(group + 32 + 16 * i, low, high);
        w[0] = fma(low, s.d, s.m);
        w[1] = fma(high, s.d, s.m);
    }
};

struct Q4_1 {
    static constexpr int64_t GROUP = 32, BYTES = 64 + 256;
    static constexpr int STEP = 2;
    struct Scale {
        V16 d, m;
    };
    INLINE Scale scale(const uint8_t* group) { return {from_half(group), from_half(group + 32)}; }
    INLINE void step(const uint8_t* group, const Scale& s, int64_t i, V16* w) {
        V16 low, high;
        from_nibbles(group + 64 + 16 * i, low, high);
        w[0] = fma(low, s.d, s.m);
        w[1] = fma(high, s.d, s.m);
    }
};

// Where results go: R rows of V panels, of whose last only ``lanes`` columns exist. ``fresh`` starts the chains at +0.
struct Out {
    float* p;
    int64_t stride, lanes;
    bool fresh;
};

template <int R, int V>
INLINE void begin(V16 (&acc)[R][V], const Out& out) {
    for (int r = 0; r < R; ++r)
        for (int v = 0; v < V; ++v)
            acc[r][v] = out.fresh ? zero16() : load16(out.p + r * out.stride + v * LANES, v + 1 < V ? LANES : out.lanes);
}

template <int R, int V>
INLINE void finish(const V16 (&acc)[R][V], const Out& out) {
    for (int r = 0; r < R; ++r)
        for (int v = 0; v < V; ++v)
            store16(out.p + r * out.stride + v * LANES, acc[r][v], v + 1 < V ? LANES : out.lanes);
}

// R rows times V panels of fp32 at w, w + panel, ...; consecutive k's lie ``step`` floats apart. ``far``: in no near cache yet.
template <int R, int V>
void multiply(const float* x, int64_t ldx, const float* w, int64_t panel, int64_t step, int64_t count, bool far, const Out& out) {
    V16 acc[R][V];
    begin(acc, out);
    for (int64_t k = 0; k < count; ++k) {
        V16 weight[V];
        for (int v = 0; v < V; ++v) weight[v] = load16(w + v * panel + k * step);
        for (int v = 0; v < V && far; ++v) __builtin_prefetch(w + v * panel + k * step + BYTES_AHEAD / 4, 0, 3);
        for (int r = 0; r < R; ++r) {
            V16 value = set16(x[r * ldx + k]);
            for (int v = 0; v < V; ++v) acc[r][v] = fma(value, weight[v], acc[r][v]);
        }
    }
    finish(acc, out);
}

// The same over panels of type T, dequantised in registers, ``groups`` groups long.
template <class T, int R, int V>
void multiply_stored(const float* x, int64_t ldx, const uint8_t* w, int64_t panel, int64_t groups, const Out& out) {
    V16 acc[R][V];
    begin(acc, out);
    for (int64_t g = 0; g < groups; ++g) {
        typename T::Scale scale[V];
        for (int v = 0; v < V; ++v) {
            const uint8_t* group = w + v * panel + g * T::BYTES;
            scale[v] = T::scale(group);
            prefetch(group + BYTES_AHEAD, T::BYTES);
        }
        for (int64_t i = 0; i < T::GROUP / T::STEP; ++i) {
            const float* values = x + g * T::GROUP + i * T::STEP;
            for (int v = 0; v < V; ++v) {
                V16 weight[T::STEP];
                T::step(w + v * panel + g * T::BYTES, scale[v], i, weight);
                for (int s = 0; s < T::STEP; ++s)
                    for (int r = 0; r < R; ++r) acc[r][v] = fma(set16(values[r * ldx + s]), weight[s], acc[r][v]);
            }
        }
    }
    finish(acc, out);
}

template <int V>
INLINE void multiply_rows(int rows, const float* x, int64_t ldx, const float* w, int64_t panel, int64_t step, int64_t count,
                          bool far, const Out& out) {
    switch (rows) {
        case 1: return multiply<1, V>(x, ldx, w, panel, step, count, far, out);
        case 2: return multiply<2, V>(x, ldx, w, panel, step, count, far, out);
        case 3: return multiply<3, V>(x, ldx, w, panel, step, count, far, out);
        case 4: return multiply<4, V>(x, ldx, w, panel, step, count, far, out);
#if LANES_AVX512 || LANES_AVX2
        case 5: return multiply<5, V>(x, ldx, w, panel, step, count, far, out);
        case 6: return multiply<6, V>(x, ldx, w, panel, step, count, far, out);
#endif
#if LANES_AVX512
        case 7: return multiply<7, V>(x, ldx, w, panel, step, count, far, out);
        case 8: return multiply<8, V>(x, ldx, w, panel, step, count, far, out);
#endif
    }
}

// Any number of rows and of columns (n, in panels of 16) of fp32 weights.
__attribute__((noinline)) static void multiply_all(int64_t rows, const float* x, int64_t ldx, const float* w,
                                                   int64_t panel, int64_t step, int64_t count, float* out, int64_t ldo,
                                                   int64_t n, bool far, bool fresh) {
    for (int64_t c = 0; c < n;) {
        int64_t left = (n - c + LANES - 1) / LANES, panels = left < PANELS ? left : PANELS;
        if (PANELS > 2 && left == PANELS + 1) panels = 2;  // four are two and two, not three and one
        const int64_t width = panels * LANES;
        int64_t lanes = (n - c < width ? n - c : width) - (panels - 1) * LANES;
        const float* weights = w + c / LANES * panel;
        for (int64_t r = 0; r < rows; r += ROWS) {
            int some = int(rows - r < ROWS ? rows - r : ROWS);
            Out place{out + r * ldo + c, ldo, lanes, fresh};
            if (panels == 1) multiply_rows<1>(some, x + r * ldx, ldx, weights, panel, step, count, far && r == 0, place);
#if LANES_AVX512
            if (panels == 2) multiply_rows<2>(some, x + r * ldx, ldx, weights, panel, step, count, far && r == 0, place);
            if (panels == 3) multiply_rows<3>(some, x + r * ldx, ldx, weights, panel, step, count, far && r == 0, place);
#endif
        }
        c += width;
    }
}

// fp32 [count][16] from one panel of type T, starting at its group ``first``.
template <class T>
void expand(const uint8_t* panel, int64_t first, int64_t count, float* out) {
    for (int64_t g = 0; g < count / T::GROUP; ++g) {
        const uint8_t* group = panel + (first + g) * T::BYTES;
        typename T::Scale scale = T::scale(group);
        for (int64_t i = 0; i < T::GROUP / T::STEP; ++i) {
            V16 weight[T::STEP];
            T::step(group, scale, i, weight);
            for (int s = 0; s < T::STEP; ++s) store16(out + (g * T::GROUP + i * T::STEP + s) * LANES, weight[s]);
        }
    }
}

// Columns ``column`` .. column + n - 1 of all rows; no bias is null.
INLINE void add_bias(const float* bias, int64_t rows, int64_t column, int64_t n, float* out, int64_t ldo) {
    for (int64_t r = 0; bias != nullptr && r < rows; ++r)
        for (int64_t c = 0; c < n; c += LANES) {
            float* place = out + r * ldo + column + c;
            store16(place, add(load16(place, n - c), load16(bias + column + c, n - c)), n - c);
        }
}

// A linear layer: out[r][n] = bias[n] + x[r] . w[n], w packed as type T.
struct Linear {
    const float* x;
    int64_t ldx, rows;
    const uint8_t* w;
    int64_t n, k;
    const float* bias;  // [n] or null
    float* out;
    int64_t ldo;
};

template <class T, int V>
INLINE void direct(const Linear& a, const uint8_t* w, int64_t panel, const Out& out) {
    int64_t groups = a.k / T::GROUP;
    switch (a.rows) {
        case 1: return multiply_stored<T, 1, V>(a.x, a.ldx, w, panel, groups, out);
        case 2: return multiply_stored<T, 2, V>(a.x, a.ldx, w, panel, groups, out);
        case 3: return multiply_stored<T, 3, V>(a.x, a.ldx, w, panel, groups, out);
        case 4: return multiply_stored<T, 4, V>(a.x, a.ldx, w, panel, groups, out);
#if LANES_AVX512
        case 5: return multiply_stored<T, 5, V>(a.x, a.ldx, w, panel, groups, out);
        case 6: return multiply_stored<T, 6, V>(a.x, a.ldx, w, panel, groups, out);
        case 7: return multiply_stored<T, 7, V>(a.x, a.ldx, w, panel, groups, out);
        case 8: return multiply_stored<T, 8, V>(a.x, a.ldx, w, panel, groups, out);
#endif
    }
}

INLINE int64_t longest_piece(const Linear& a) { return a.rows < MANY ? K_PIECE : K_LONG; }

// Panels first .. first + panels - 1 for all rows. ``scratch`` has room for ``tile_floats``.
INLINE int64_t tile_floats(const Linear& a) { return PANELS * longest_piece(a) * LANES; }

template <class T>
void linear_tile(const Linear& a, int64_t first, int64_t panels, float* scratch) {
    const int64_t bytes = a.k / T::GROUP * T::BYTES, column = first * LANES;
    const uint8_t* w = a.w + first * bytes;
    const int64_t n = a.n - column < panels * LANES ? a.n - column : panels * LANES;
    const int64_t lanes = n - (panels - 1) * LANES;
    if (a.rows <= DIRECT) {
        if (a.rows == 1 && panels == ALONE) {
            multiply_stored<T, 1, ALONE>(a.x, a.ldx, w, bytes, a.k / T::GROUP, {a.out + column, a.ldo, lanes, true});
        } else {
            for (int64_t p = 0; p < panels; p += PANELS) {
                int64_t some = panels - p < PANELS ? panels - p : PANELS;
                Out out{a.out + column + p * LANES, a.ldo, p + some == panels ? lanes : LANES, true};
                if (some == 1) direct<T, 1>(a, w + p * bytes, bytes, out);
#if LANES_AVX512
                if (some == 2) direct<T, 2>(a, w + p * bytes, bytes, out);
                if (some == 3) direct<T, 3>(a, w + p * bytes, bytes, out);
#endif
            }
        }
    } else {
        const int64_t longest = longest_piece(a);
        for (int64_t k = 0; k < a.k; k += longest) {
            int64_t count = a.k - k < longest ? a.k - k : longest;
            const float* piece = reinterpret_cast<const float*>(w) + k * LANES;
            int64_t stride = a.k * LANES;
            if (T::BYTES != F32::BYTES) {
                stride = count * LANES;
                for (int64_t p = 0; p < panels; ++p) expand<T>(w + p * bytes, k / T::GROUP, count, scratch + p * stride);
                piece = scratch;
                const bool last = k + count == a.k;  // the next tile's weights lie behind this one's
                for (int64_t p = 0; p < panels && a.rows < MANY; ++p)
                    prefetch(w + (last ? panels + p : p) * bytes + (last ? 0 : (k + count) / T::GROUP * T::BYTES),
                             longest / T::GROUP * T::BYTES);
            }
            multiply_all(a.rows, a.x + k, a.ldx, piece, stride, LANES, count, a.out + column, a.ldo, n,
                         T::BYTES == F32::BYTES && a.rows < MANY, k == 0);
        }
    }
    add_bias(a.bias, a.rows, column, n, a.out, a.ldo);
}

// Packing: rows of a file's own type to panels. Rows beyond n are zero. Scalar, since it happens once.

INLINE void pack_floats(const uint8_t* src, int64_t n, int64_t k, int64_t size, uint8_t* out) {
    const int64_t panels = (n + LANES - 1) / LANES;
    for (int64_t p = 0; p < panels; ++p)
        for (int64_t i = 0; i < k; ++i)
            for (int64_t lane = 0; lane < LANES; ++lane) {
                uint8_t* place = out + ((p * k + i) * LANES + lane) * size;
                int64_t row = p * LANES + lane;
                if (row < n)
                    std::memcpy(place, src + (row * k + i) * size, size_t(size));
                else
                    std::memset(place, 0, size_t(size));
            }
}

// ``halves`` fp16 scales, then 16 bytes of nibbles (i low, i + 16 high) or 32 int8.
INLINE void pack_groups(const uint8_t* src, int64_t n, int64_t k, int64_t halves, bool nibbles, uint8_t* out) {
    const int64_t groups = k / 32, from = 2 * halves + (nibbles ? 16 : 32), to = 32 * halves + (nibbles ? 256 : 512);
    const int64_t panels = (n + LANES - 1) / LANES;
    std::memset(out, 0, size_t(panels * groups * to));
    for (int64_t row = 0; row < n; ++row)
        for (int64_t g = 0; g < groups; ++g) {
            const uint8_t* block = src + (row * groups + g) * from;
            uint8_t* group = out + ((row / LANES) * groups + g) * to;
            const int64_t lane = row % LANES;
            for (int64_t h = 0; h < halves; ++h) std::memcpy(group + 32 * h + 2 * lane, block + 2 * h, 2);
            const uint8_t* q = block + 2 * halves;
            uint8_t* packed = group + 32 * halves;
            for (int64_t i = 0; i < (nibbles ? 16 : 32); ++i) {
                if (!nibbles) {
                    packed[i * LANES + lane] = q[i];
                    continue;
                }
                int64_t even = 2 * i, odd = 2 * i + 1;
                int low = even < 16 ? q[even] & 15 : q[even - 16] >> 4;
                int high = odd < 16 ? q[odd] & 15 : q[odd - 16] >> 4;
                packed[i * LANES + lane] = uint8_t(low | (high << 4));
            }
        }
}
