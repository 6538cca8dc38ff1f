// Products of 8-bit activations with quantised weights (--compute int8): integers inside a group of 32, fp32 between groups.
//
//     quantise   x[r] by groups of 32: d = max |x| / 127, q = x / d to nearest, s = sum of q
//     product    out[r][n] = sum over groups, ascending, of float(sum of q w) d_x d_w  (+ m_w d_x s)
//
// A row is quantised from the row alone, integer sums are exact in any order, and the chain over groups has one order. So a
// row's bytes belong to the row alone, as in product.h. Weights lie in panels of 16 outputs; four consecutive k of one output
// are one 32-bit lane, which is what a dot product of bytes takes:
//
//     Q8_0   d[16] as fp16, then 8 times [16][4] int8: k = 4 b + j
//     Q4_0   d[16] as fp16, then 4 times [16][4] bytes: k = 8 b + j low, 8 b + 4 + j high        w = d (q - 8)
//     Q4_1   d[16], m[16] as fp16, then the same                                                 w = d q + m
#pragma once

#include "product.h"

#if LANES_AVX512 && defined(__AVX512VNNI__)
#define DOT_VNNI 1
#elif LANES_AVX512 || LANES_AVX2
#define DOT_AVX2 1
#endif

constexpr int64_t GROUP = 32;

#if DOT_VNNI

constexpr int DOT_ROWS = 4, DOT_PANELS = 2, DOT_ALONE = 4;
struct I16 {
    __m512i v;
};
struct B64 {
    __m512i v;
};
INLINE I16 zero_int() { return {_mm512_setzero_si512()}; }
INLINE B64 bytes(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }
INLINE B64 low_nibbles(B64 x) { return {_mm512_and_si512(x.v, _mm512_set1_epi8(15))}; }
INLINE B64 high_nibbles(B64 x) { return {_mm512_and_si512(_mm512_srli_epi16(x.v, 4), _mm512_set1_epi8(15))}; }
INLINE B64 unsigned_of(B64 x) { return {_mm512_xor_si512(x.v, _mm512_set1_epi8(-128))}; }
INLINE I16 dot(I16 sum, B64 w, int32_t four) { return {_mm512_dpbusd_epi32(sum.v, w.v, _mm512_set1_epi32(four))}; }
INLINE V16 to_float(I16 x) { return {_mm512_cvtepi32_ps(x.v)}; }

#elif DOT_AVX2

constexpr int DOT_ROWS = 2, DOT_PANELS = 1, DOT_ALONE = 1;
struct I16 {
    __m256i a, b;
};
struct B64 {
    __m256i a, b;
};
INLINE I16 zero_int() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
INLINE B64 bytes(const uint8_t* p) {
    return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)), _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 32))};
}
INLINE B64 low_nibbles(B64 x) {
    const __m256i mask = _mm256_set1_epi8(15);
    return {_mm256_and_si256(x.a, mask), _mm256_and_si256(x.b, mask)};
}
INLINE B64 high_nibbles(B64 x) {
    const __m256i mask = _mm256_set1_epi8(15);
    return {_mm256_and_si256(_mm256_srli_epi16(x.a, 4), mask), _mm256_and_si256(_mm256_srli_epi16(x.b, 4), mask)};
}
// The instruction takes one unsigned operand and saturates pairs to 16 bits: 2 x 15 x 127 and 2 x 128 x 127 both fit.
INLINE __m256i dot8(__m256i sum, __m256i w, __m256i x) {
    return _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(w, x), _mm256_set1_epi16(1)));
}
INLINE I16 dot(I16 sum, B64 w, int32_t four) {
    const __m256i x = _mm256_set1_epi32(four);
    return {dot8(sum.a, w.a, x), dot8(sum.b, w.b, x)};
}
INLINE I16 dot_signed(I16 sum, B64 w, int32_t four) {
    const __m256i x = _mm256_set1_epi32(four);
    return {dot8(sum.a, _mm256_abs_epi8(w.a), _mm256_sign_epi8(x, w.a)), dot8(sum.b, _mm256_abs_epi8(w.b), _mm256_sign_epi8(x, w.b))};
}
#if LANES_AVX512
INLINE V16 to_float(I16 x) {
    return {_mm512_cvtepi32_ps(_mm512_inserti64x4(_mm512_castsi256_si512(x.a), x.b, 1))};
}
#else
INLINE V16 to_float(I16 x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
#endif

#else

constexpr int DOT_ROWS = 2, DOT_PANELS = 1, DOT_ALONE = 1;
struct I16 {
    int32_t v[LANES];
};
struct B64 {
    uint8_t v[4 * LANES];
};
INLINE I16 zero_int() { return {}; }
INLINE B64 bytes(const uint8_t* p) {
    B64 r;
    std::memcpy(r.v, p, sizeof r.v);
    return r;
}
INLINE B64 low_nibbles(B64 x) {
    for (uint8_t& byte : x.v) byte &= 15;
    return x;
}
INLINE B64 high_nibbles(B64 x) {
    for (uint8_t& byte : x.v) byte >>= 4;
    return x;
}
template <class Byte>
INLINE I16 dot_of(I16 sum, const B64& w, int32_t four) {
    int8_t x[4];
    std::memcpy(x, &four, 4);
    for (int i = 0; i < LANES; ++i)
        for (int j = 0; j < 4; ++j) sum.v[i] += int32_t(Byte(w.v[4 * i + j])) * x[j];
    return sum;
}
INLINE I16 dot(I16 sum, const B64& w, int32_t four) { return dot_of<uint8_t>(sum, w, four); }
INLINE I16 dot_signed(I16 sum, const B64& w, int32_t four) { return dot_of<int8_t>(sum, w, four); }
INLINE V16 to_float(const I16& x) {
    V16 r;
    for (int i = 0; i < LANES; ++i) r.v[i] = float(x.v[i]);
    return r;
}

#endif

// Weight types: BLOCKS of 64 bytes after HEAD bytes of scales. OFFSET was added to each weight to make it unsigned.
struct Int8 {
    static constexpr int64_t HEAD = 32, BLOCKS = 8, BYTES = HEAD + 64 * BLOCKS;
    static constexpr bool NIBBLES = false, MINIMUM = false;
#if DOT_VNNI
    static constexpr int OFFSET = 128;
#else
    static constexpr int OFFSET = 0;
#endif
};
struct Nibbles0 {
    static constexpr int64_t HEAD = 32, BLOCKS = 4, BYTES = HEAD + 64 * BLOCKS;
    static constexpr bool NIBBLES = true, MINIMUM = false;
    static constexpr int OFFSET = 8;
};
struct Nibbles1 {
    static constexpr int64_t HEAD = 64, BLOCKS = 4, BYTES = HEAD + 64 * BLOCKS;
    static constexpr bool NIBBLES = true, MINIMUM = true;
    static constexpr int OFFSET = 0;
};

struct Integer {
    const int8_t* q;      // [rows][k]
    const float* scales;  // [rows][k / 32][2]: d, sum of q
    int64_t rows;
    const uint8_t* w;
    int64_t n, k;
    const float* bias;  // [n] or null
    float* out;
    int64_t ldo, type;
};

INLINE int32_t four_at(const int8_t* q) {
    int32_t four;
    std::memcpy(&four, q, 4);
    return four;
}

// Sums of products of one group: R rows of activations with V panels.
template <class T, int R, int V>
INLINE void dot_group(const Integer& a, const int8_t* q, const uint8_t* w, int64_t panel, I16 (&sum)[R][V]) {
#pragma GCC unroll 1
    for (int64_t b = 0; b < T::BLOCKS; ++b)
        for (int v = 0; v < V; ++v) {
            B64 block = bytes(w + v * panel + T::HEAD + 64 * b);
            if constexpr (T::NIBBLES) {
                B64 low = low_nibbles(block), high = high_nibbles(block);
                for (int r = 0; r < R; ++r) {
                    sum[r][v] = dot(sum[r][v], low, four_at(q + r * a.k + 8 * b));
                    sum[r][v] = dot(sum[r][v], high, four_at(q + r * a.k + 8 * b + 4));
                }
            } else {
#if DOT_VNNI
                block = unsigned_of(block);
                for (int r = 0; r < R; ++r) sum[r][v] = dot(sum[r][v], block, four_at(q + r * a.k + 4 * b));
#else
                for (int r = 0; r < R; ++r) sum[r][v] = dot_signed(sum[r][v], block, four_at(q + r * a.k + 4 * b));
#endif
            }
        }
}

template <class T, int R, int V>
void multiply_integer(const Integer& a, int64_t row, const uint8_t* w, int64_t panel, const Out& out) {
    V16 acc[R][V];
    begin(acc, out);
    for (int64_t g = 0; g < a.k / GROUP; ++g, w += T::BYTES) {
        I16 sum[R][V];
        for (int r = 0; r < R; ++r)
            for (int v = 0; v < V; ++v) sum[r][v] = zero_int();
        dot_group<T, R, V>(a, a.q + row * a.k + g * GROUP, w, panel, sum);
        for (int v = 0; v < V; ++v) {
            const V16 d = from_half(w + v * panel);
            for (int r = 0; r < R; ++r) {
                const float* scale = a.scales + ((row + r) * (a.k / GROUP) + g) * 2;
                V16 whole = to_float(sum[r][v]);
                if (T::OFFSET) whole = fma(set16(-float(T::OFFSET)), set16(scale[1]), whole);  // exact: below 2^24
                acc[r][v] = fma(whole, mul(d, set16(scale[0])), acc[r][v]);
                if (T::MINIMUM) acc[r][v] = fma(from_half(w + v * panel + 32), set16(scale[0] * scale[1]), acc[r][v]);
            }
        }
    }
    finish(acc, out);
}

template <class T, int V>
INLINE void multiply_integer_rows(int rows, const Integer& a, int64_t row, const uint8_t* w, int64_t panel, const Out& out) {
    switch (rows) {
        case 1: return multiply_integer<T, 1, V>(a, row, w, panel, out);
        case 2: return multiply_integer<T, 2, V>(a, row, w, panel, out);
#if DOT_VNNI
        case 3: return multiply_integer<T, 3, V>(a, row, w, panel, out);
        case 4: return multiply_integer<T, 4, V>(a, row, w, panel, out);
#endif
    }
}

INLINE int64_t integer_panels(const Integer& a) { return a.rows == 1 ? DOT_ALONE : DOT_PANELS; }

INLINE int64_t integer_units(const Integer& a) {
    const int64_t panels = (a.n + LANES - 1) / LANES, per = integer_panels(a);
    return (panels + per - 1) / per;
}

template <class T>
void integer_tile(const Integer& a, int64_t unit) {
    const int64_t all = (a.n + LANES - 1) / LANES, first = unit * integer_panels(a), bytes = a.k / GROUP * T::BYTES;
    const int64_t panels = all - first < integer_panels(a) ? all - first : integer_panels(a);
    const uint8_t* w = a.w + first * bytes;
    const int64_t column = first * LANES, n = a.n - column < panels * LANES ? a.n - column : panels * LANES;
    for (int64_t r = 0; r < a.rows; r += DOT_ROWS) {
        const int some = int(a.rows - r < DOT_ROWS ? a.rows - r : DOT_ROWS);
        if (a.rows == 1 && panels == DOT_ALONE) {
            multiply_integer<T, 1, DOT_ALONE>(a, 0, w, bytes, {a.out + column, a.ldo, n - (panels - 1) * LANES, true});
            continue;
        }
        for (int64_t p = 0; p < panels; p += DOT_PANELS) {
            const bool two = DOT_PANELS == 2 && p + 1 < panels;
            const int64_t end = p + 1 + two;
            Out out{a.out + r * a.ldo + column + p * LANES, a.ldo, end == panels ? n - (end - 1) * LANES : LANES, true};
            if (two)
                multiply_integer_rows<T, DOT_PANELS>(some, a, r, w + p * bytes, bytes, out);
            else
                multiply_integer_rows<T, 1>(some, a, r, w + p * bytes, bytes, out);
        }
    }
    add_bias(a.bias, a.rows, column, n, a.out, a.ldo);
}

// Activations ---------------------------------------------------------------------------------------------------------

struct Quantise {
    const float* x;
    int64_t ldx, rows, k;
    int8_t* q;
    float* scales;
};

// A group that holds an infinity or NaN has no numbers, but a scale that makes every product NaN.
INLINE void quantise_group(const float* x, int8_t* q, float* scale) {
    constexpr float TINY = 1e-30f, ROUND = 12582912.0f;  // 1.5 * 2^23: adding and taking it away rounds to a whole number
    uint32_t most = 0;
    for (int i = 0; i < GROUP; ++i) {
        uint32_t magnitude;
        std::memcpy(&magnitude, x + i, 4);
        magnitude &= 0x7fffffff;
        most = magnitude > most ? magnitude : most;
    }
    const float largest = bits_to_float(most);
    const bool finite = most < 0x7f800000;
    const float factor = finite && largest >= TINY ? 127.0f / largest : 0.0f;
    int32_t sum = 0;
    for (int i = 0; i < GROUP; ++i) {
        const float value = finite ? x[i] * factor : 0.0f;
        const int32_t whole = int32_t((value + ROUND) - ROUND);
        q[i] = int8_t(whole);
        sum += whole;
    }
    scale[0] = finite ? (largest >= TINY ? largest / 127.0f : 0.0f) : NAN;
    scale[1] = float(sum);
}

INLINE void quantise_row(const Quantise& a, int64_t row) {
    const int64_t groups = a.k / GROUP;
    for (int64_t g = 0; g < groups; ++g)
        quantise_group(a.x + row * a.ldx + g * GROUP, a.q + row * a.k + g * GROUP, a.scales + (row * groups + g) * 2);
}

// Packing, from the rows of the file: ``halves`` fp16 scales, then 16 bytes of nibbles (i low, i + 16 high) or 32 int8.
INLINE void pack_integer(const uint8_t* src, int64_t n, int64_t k, int64_t halves, bool nibbles, uint8_t* out) {
    const int64_t groups = k / GROUP, from = 2 * halves + (nibbles ? 16 : 32), to = 32 * halves + (nibbles ? 256 : 512);
    std::memset(out, 0, size_t((n + LANES - 1) / LANES * groups * to));
    for (int64_t row = 0; row < n; ++row)
        for (int64_t g = 0; g < groups; ++g) {
            const uint8_t* block = src + (row * groups + g) * from;
            uint8_t* group = out + ((row / LANES) * groups + g) * to;
            const int64_t lane = row % LANES;
            for (int64_t h = 0; h < halves; ++h) std::memcpy(group + 32 * h + 2 * lane, block + 2 * h, 2);
            const uint8_t* q = block + 2 * halves;
            uint8_t* packed = group + 32 * halves + 4 * lane;
            for (int64_t i = 0; i < GROUP; ++i) {
                if (!nibbles) {
                    packed[i / 4 * 64 + i % 4] = q[i];
                    continue;
                }
                const int value = i < 16 ? q[i] & 15 : q[i - 16] >> 4;
                packed[i / 8 * 64 + i % 4] |= uint8_t(i % 8 < 4 ? value : value << 4);
            }
        }
}
