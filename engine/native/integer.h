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
constexpr int64_t DOT_AHEAD = 6;  // groups

#if DOT_VNNI

constexpr int DOT_ROWS = 4, DOT_PANELS = 3, DOT_ALONE = 4;  // 12 sums of integers and 12 of floats
struct I16 {
    __m512i v;
};
struct B64 {
    __m512i v;
};
INLINE I16 all(int32_t x) { return {_mm512_set1_epi32(x)}; }
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
INLINE I16 all(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
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
INLINE I16 all(int32_t x) {
    I16 r;
    for (int32_t& lane : r.v) lane = x;
    return r;
}
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
#pragma GCC unroll 8
    for (int64_t b = 0; b < T::BLOCKS; ++b) {
        B64 block[V];
        for (int v = 0; v < V; ++v) block[v] = bytes(w + v * panel + T::HEAD + 64 * b);
        if constexpr (T::NIBBLES) {
            B64 part[V];
            for (int v = 0; v < V; ++v) part[v] = low_nibbles(block[v]);
            for (int r = 0; r < R; ++r) {
                const int32_t x = four_at(q + r * a.k + 8 * b);
                for (int v = 0; v < V; ++v) sum[r][v] = dot(sum[r][v], part[v], x);
            }
            for (int v = 0; v < V; ++v) part[v] = high_nibbles(block[v]);
            for (int r = 0; r < R; ++r) {
                const int32_t x = four_at(q + r * a.k + 8 * b + 4);
                for (int v = 0; v < V; ++v) sum[r][v] = dot(sum[r][v], part[v], x);
            }
        } else {
#if DOT_VNNI
            for (int v = 0; v < V; ++v) block[v] = unsigned_of(block[v]);
#endif
            for (int r = 0; r < R; ++r) {
                const int32_t x = four_at(q + r * a.k + 4 * b);
#if DOT_VNNI
                for (int v = 0; v < V; ++v) sum[r][v] = dot(sum[r][v], block[v], x);
#else
                for (int v = 0; v < V; ++v) sum[r][v] = dot_signed(sum[r][v], block[v], x);
#endif
            }
        }
    }
}

// ``ahead``: bytes of a panel that are asked for before they are read, or 0. A panel is shorter than what a processor needs to
// notice a stream; rows behind the first find the weights in the cache.
template <class T, int R, int V>
void multiply_integer(const Integer& a, int64_t row, const uint8_t* w, int64_t panel, const Out& out,
                      int64_t ahead) {
    V16 acc[R][V];
    begin(acc, out);
    for (int64_t g = 0; g < a.k / GROUP; ++g, w += T::BYTES) {
        for (int v = 0; ahead != 0 && v < V; ++v)
            for (int64_t line = 0; line < T::BYTES; line += 64) __builtin_prefetch(w + v * panel + ahead + line);
        const float* scales = a.scales + (row * (a.k / GROUP) + g) * 2;
        I16 sum[R][V];
        for (int r = 0; r < R; ++r) {
            // What was added to each weight is taken from the sum before it begins, which is exact in integers.
            const I16 first = all(T::OFFSET ? -T::OFFSET * int32_t(scales[r * (a.k / GROUP) * 2 + 1]) : 0);
            for (int v = 0; v < V; ++v) sum[r][v] = first;
        }
        dot_group<T, R, V>(a, a.q + row * a.k + g * GROUP, w, panel, sum);
        V16 d[V], m[V];
        for (int v = 0; v < V; ++v) d[v] = from_half(w + v * panel);
        for (int v = 0; T::MINIMUM && v < V; ++v) m[v] = from_half(w + v * panel + 32);
        for (int r = 0; r < R; ++r) {
            const float* scale = scales + r * (a.k / GROUP) * 2;
            const V16 x = set16(scale[0]), least = set16(scale[0] * scale[1]);
            for (int v = 0; v < V; ++v) {
                acc[r][v] = fma(to_float(sum[r][v]), mul(d[v], x), acc[r][v]);
                if (T::MINIMUM) acc[r][v] = fma(m[v], least, acc[r][v]);
            }
        }
    }
    finish(acc, out);
}

template <class T, int V>
INLINE void multiply_integer_rows(int rows, const Integer& a, int64_t row, const uint8_t* w, int64_t panel, const Out& out) {
    const int64_t ahead = row == 0 ? DOT_AHEAD * T::BYTES : 0;
    switch (rows) {
        case 1: return multiply_integer<T, 1, V>(a, row, w, panel, out, ahead);
        case 2: return multiply_integer<T, 2, V>(a, row, w, panel, out, ahead);
#if DOT_VNNI
        case 3: return multiply_integer<T, 3, V>(a, row, w, panel, out, ahead);
        case 4: return multiply_integer<T, 4, V>(a, row, w, panel, out, ahead);
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
            const Out out{a.out + column, a.ldo, n - (panels - 1) * LANES, true};
            multiply_integer<T, 1, DOT_ALONE>(a, 0, w, bytes, out, DOT_AHEAD * T::BYTES);
            continue;
        }
        for (int64_t p = 0; p < panels; p += DOT_PANELS) {
            const int64_t part = panels - p < DOT_PANELS ? panels - p : DOT_PANELS, end = p + part;
            Out out{a.out + r * a.ldo + column + p * LANES, a.ldo, end == panels ? n - (end - 1) * LANES : LANES, true};
            if (part == 1) multiply_integer_rows<T, 1>(some, a, r, w + p * bytes, bytes, out);
            if constexpr (DOT_PANELS > 1) {
                if (part == 2) multiply_integer_rows<T, 2>(some, a, r, w + p * bytes, bytes, out);
            }
            if constexpr (DOT_PANELS > 2) {
                if (part == 3) multiply_integer_rows<T, 3>(some, a, r, w + p * bytes, bytes, out);
            }
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

// A group that holds an infinity or NaN has no numbers, but a scale that makes every product NaN. ``most``: the largest
// magnitude of a group, as the bits of a float. What numbers are multiplied by, and the scale; 0 and 0 where all are as good
// as zero.
INLINE float quantise_scale(uint32_t most, float* scale) {
    constexpr float TINY = 1e-30f;
    const float largest = bits_to_float(most);
    const bool finite = most < 0x7f800000, some = finite && largest >= TINY;
    scale[0] = some ? largest / 127.0f : finite ? 0.0f : NAN;
    return some ? 127.0f / largest : 0.0f;
}

#if LANES_AVX512
INLINE void quantise_group(const float* x, int8_t* q, float* scale) {
    const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
    const __m512 low = _mm512_loadu_ps(x), high = _mm512_loadu_ps(x + LANES);
    const __m512i most = _mm512_max_epu32(_mm512_and_si512(_mm512_castps_si512(low), magnitude),
                                          _mm512_and_si512(_mm512_castps_si512(high), magnitude));
    const __m512 factor = _mm512_set1_ps(quantise_scale(_mm512_reduce_max_epu32(most), scale));
    const __mmask16 finite = scale[0] == scale[0] ? 0xffff : 0;
    const __m512i first = _mm512_maskz_cvtps_epi32(finite, _mm512_mul_ps(low, factor));  // to nearest, ties to even
    const __m512i second = _mm512_maskz_cvtps_epi32(finite, _mm512_mul_ps(high, factor));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(q), _mm512_cvtepi32_epi8(first));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(q + LANES), _mm512_cvtepi32_epi8(second));
    scale[1] = float(_mm512_reduce_add_epi32(_mm512_add_epi32(first, second)));
}
#else
INLINE void quantise_group(const float* x, int8_t* q, float* scale) {
    constexpr float ROUND = 12582912.0f;  // 1.5 * 2^23: adding and taking it away rounds to a whole number
    uint32_t most = 0;
    for (int i = 0; i < GROUP; ++i) {
        uint32_t magnitude;
        std::memcpy(&magnitude, x + i, 4);
        magnitude &= 0x7fffffff;
        most = magnitude > most ? magnitude : most;
    }
    const float factor = quantise_scale(most, scale);
    const bool finite = scale[0] == scale[0];
    int32_t sum = 0;
    for (int i = 0; i < GROUP; ++i) {
        const float value = finite ? x[i] * factor : 0.0f;
        const int32_t whole = int32_t((value + ROUND) - ROUND);
        q[i] = int8_t(whole);
        sum += whole;
    }
    scale[1] = float(sum);
}
#endif

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
