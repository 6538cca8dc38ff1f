// Sixteen fp32 lanes, whatever the machine's vectors are wide: one 512-bit register, two of 256 bits, or an array that
// the compiler vectorises. Every operation works lane by lane and is rounded once, so AVX2 and AVX-512 give the same
// bits; the portable path rounds between multiply and add and may differ from both.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__)
#define LANES_AVX512 1
#include <immintrin.h>
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define LANES_AVX2 1
#include <immintrin.h>
#endif

constexpr int64_t LANES = 16;

#define INLINE static inline __attribute__((always_inline))

INLINE float bits_to_float(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

INLINE float half_to_float(uint16_t half) {
    uint32_t sign = uint32_t(half & 0x8000) << 16, exponent = (half >> 10) & 31, fraction = half & 0x3ff;
    if (exponent == 0) {  // zero or subnormal: fraction * 2^-24, exact
        float value = float(fraction) * 5.9604644775390625e-8f;
        return sign ? -value : value;
    }
    if (exponent == 31) return bits_to_float(sign | 0x7f800000 | (fraction << 13));
    return bits_to_float(sign | ((exponent + 112) << 23) | (fraction << 13));
}

INLINE uint16_t float_to_bf16(float value) {  // to nearest, ties to even; NaN stays NaN
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    if ((bits & 0x7fffffff) > 0x7f800000) return uint16_t((bits >> 16) | 0x40);
    return uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

INLINE uint16_t float_to_half(float value) {  // to nearest, ties to even; beyond the largest number is that, but infinity and NaN stay
    value = std::fabs(value) == INFINITY ? value : value > 65504.0f ? 65504.0f : value < -65504.0f ? -65504.0f : value;
#if defined(__F16C__)
    return uint16_t(_cvtss_sh(value, 0));
#else
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    const uint32_t sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000) return uint16_t(sign | 0x7e00 | (magnitude >> 13 & 0x1ff));
    if (magnitude == 0x7f800000) return uint16_t(sign | 0x7c00);
    if (magnitude < 0x38800000) {  // subnormal: adding 0.5 leaves the number of halves of 2^-24 in the last bits
        float shifted = bits_to_float(magnitude) + 0.5f;
        std::memcpy(&bits, &shifted, 4);
        return uint16_t(sign | (bits - 0x3f000000));
    }
    return uint16_t(sign | ((magnitude - 0x38000000 + 0xfff + (magnitude >> 13 & 1)) >> 13));
#endif
}

#if LANES_AVX512

struct V16 {
    __m512 v;
};
INLINE V16 zero16() { return {_mm512_setzero_ps()}; }
INLINE V16 set16(float x) { return {_mm512_set1_ps(x)}; }
INLINE V16 load16(const float* p) { return {_mm512_loadu_ps(p)}; }
INLINE void store16(float* p, V16 x) { _mm512_storeu_ps(p, x.v); }
INLINE V16 add(V16 a, V16 b) { return {_mm512_add_ps(a.v, b.v)}; }
INLINE V16 sub(V16 a, V16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
INLINE V16 mul(V16 a, V16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
INLINE V16 div(V16 a, V16 b) { return {_mm512_div_ps(a.v, b.v)}; }
INLINE V16 fma(V16 a, V16 b, V16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
// Both return b where a or b is NaN, so a bound goes first and the number second.
INLINE V16 max(V16 a, V16 b) { return {_mm512_max_ps(a.v, b.v)}; }
INLINE V16 min(V16 a, V16 b) { return {_mm512_min_ps(a.v, b.v)}; }
INLINE V16 power_of_two(V16 n) {  // n whole, in -126..127
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n.v), _mm512_set1_epi32(127)), 23))};
}
INLINE V16 from_int8(const uint8_t* p) {
    return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
}
INLINE void from_nibbles(const uint8_t* p, V16& low, V16& high) {
    __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    const __m512 numbers = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    low = {_mm512_permutexvar_ps(bytes, numbers)};  // looks at the low four bits only: mask and conversion in one
    high = {_mm512_permutexvar_ps(_mm512_srli_epi32(bytes, 4), numbers)};
}
INLINE V16 from_half(const uint8_t* p) {
    return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
INLINE V16 from_bf16(const uint8_t* p) {
    __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
}

#elif LANES_AVX2

struct V16 {
    __m256 a, b;
};
INLINE V16 zero16() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
INLINE V16 set16(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
INLINE V16 load16(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
INLINE void store16(float* p, V16 x) {
    _mm256_storeu_ps(p, x.a);
    _mm256_storeu_ps(p + 8, x.b);
}
INLINE V16 add(V16 x, V16 y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
INLINE V16 sub(V16 x, V16 y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
INLINE V16 mul(V16 x, V16 y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
INLINE V16 div(V16 x, V16 y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
INLINE V16 fma(V16 x, V16 y, V16 z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
INLINE V16 max(V16 x, V16 y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
INLINE V16 min(V16 x, V16 y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
INLINE __m256 power_of_two8(__m256 n) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}
INLINE V16 power_of_two(V16 n) { return {power_of_two8(n.a), power_of_two8(n.b)}; }
INLINE V16 from_int8(const uint8_t* p) {
    __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)),
            _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(bytes, 8)))};
}
INLINE void from_nibbles(const uint8_t* p, V16& low, V16& high) {
    __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    __m256i a = _mm256_cvtepu8_epi32(bytes), b = _mm256_cvtepu8_epi32(_mm_srli_si128(bytes, 8));
    __m256i mask = _mm256_set1_epi32(15);
    low = {_mm256_cvtepi32_ps(_mm256_and_si256(a, mask)), _mm256_cvtepi32_ps(_mm256_and_si256(b, mask))};
    high = {_mm256_cvtepi32_ps(_mm256_srli_epi32(a, 4)), _mm256_cvtepi32_ps(_mm256_srli_epi32(b, 4))};
}
INLINE V16 from_half(const uint8_t* p) {
    return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))),
            _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 16)))};
}
INLINE __m256 from_bf16x8(const uint8_t* p) {
    __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
INLINE V16 from_bf16(const uint8_t* p) { return {from_bf16x8(p), from_bf16x8(p + 16)}; }

#else

struct V16 {
    float v[LANES];
};
#define EACH_LANE(expression)                                  \
    do {                                                       \
        V16 r;                                                 \
        for (int i = 0; i < LANES; ++i) r.v[i] = (expression); \
        return r;                                              \
    } while (0)
INLINE V16 zero16() { EACH_LANE(0.0f); }
INLINE V16 set16(float x) { EACH_LANE(x); }
INLINE V16 load16(const float* p) { EACH_LANE(p[i]); }
INLINE void store16(float* p, V16 x) { std::memcpy(p, x.v, sizeof x.v); }
INLINE V16 add(V16 a, V16 b) { EACH_LANE(a.v[i] + b.v[i]); }
INLINE V16 sub(V16 a, V16 b) { EACH_LANE(a.v[i] - b.v[i]); }
INLINE V16 mul(V16 a, V16 b) { EACH_LANE(a.v[i] * b.v[i]); }
INLINE V16 div(V16 a, V16 b) { EACH_LANE(a.v[i] / b.v[i]); }
INLINE V16 fma(V16 a, V16 b, V16 c) { EACH_LANE(a.v[i] * b.v[i] + c.v[i]); }
INLINE V16 max(V16 a, V16 b) { EACH_LANE(a.v[i] > b.v[i] ? a.v[i] : b.v[i]); }
INLINE V16 min(V16 a, V16 b) { EACH_LANE(a.v[i] < b.v[i] ? a.v[i] : b.v[i]); }
INLINE V16 power_of_two(V16 n) {  // a NaN has no whole number; the caller's polynomial carries it on
    EACH_LANE(bits_to_float(uint32_t((n.v[i] == n.v[i] ? int32_t(n.v[i]) : 0) + 127) << 23));
}
INLINE V16 from_int8(const uint8_t* p) { EACH_LANE(float(int8_t(p[i]))); }
INLINE void from_nibbles(const uint8_t* p, V16& low, V16& high) {
    for (int i = 0; i < LANES; ++i) {
        low.v[i] = float(p[i] & 15);
        high.v[i] = float(p[i] >> 4);
    }
}
INLINE uint16_t read16(const uint8_t* p) {
    uint16_t value;
    std::memcpy(&value, p, 2);
    return value;
}
INLINE V16 from_half(const uint8_t* p) { EACH_LANE(half_to_float(read16(p + 2 * i))); }
INLINE V16 from_bf16(const uint8_t* p) { EACH_LANE(bits_to_float(uint32_t(read16(p + 2 * i)) << 16)); }
#undef EACH_LANE

#endif

// The first n lanes of memory; the others are zero.
INLINE V16 load16(const float* p, int64_t n) {
    if (n >= LANES) return load16(p);
    float lanes[LANES] = {};
    std::memcpy(lanes, p, size_t(n) * 4);
    return load16(lanes);
}

INLINE void store16(float* p, V16 x, int64_t n) {
    if (n >= LANES) return store16(p, x);
    float lanes[LANES];
    store16(lanes, x);
    std::memcpy(p, lanes, size_t(n) * 4);
}

// A tree of fixed shape: lane i takes lane i + 8, then i + 4, i + 2, i + 1; in registers where there are any.
#if LANES_AVX512 || LANES_AVX2
#if LANES_AVX512
INLINE __m256 low_half(V16 x) { return _mm512_castps512_ps256(x.v); }
INLINE __m256 high_half(V16 x) { return _mm512_extractf32x8_ps(x.v, 1); }
#else
INLINE __m256 low_half(V16 x) { return x.a; }
INLINE __m256 high_half(V16 x) { return x.b; }
#endif
INLINE float sum_lanes(V16 x) {
    __m256 eight = _mm256_add_ps(low_half(x), high_half(x));
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

INLINE float largest_lane(V16 x) {
    __m256 eight = _mm256_max_ps(low_half(x), high_half(x));
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}
#else
INLINE float sum_lanes(V16 x) {
    float lanes[LANES];
    store16(lanes, x);
    for (int half = 8; half > 0; half /= 2)
        for (int i = 0; i < half; ++i) lanes[i] = lanes[i] + lanes[i + half];
    return lanes[0];
}

INLINE float largest_lane(V16 x) {
    float lanes[LANES];
    store16(lanes, x);
    for (int half = 8; half > 0; half /= 2)
        for (int i = 0; i < half; ++i) lanes[i] = lanes[i] > lanes[i + half] ? lanes[i] : lanes[i + half];
    return lanes[0];
}
#endif

// e^x to about 1 ulp in -87..88, clamped outside; NaN stays NaN. Reduction by ln 2 in two parts, then a polynomial of
// degree 6 in Horner's form with the coefficients of the Taylor series' minimax neighbour (Cephes, S. Moshier).
INLINE V16 exp16(V16 x) {
    x = min(set16(88.0f), max(set16(-87.0f), x));
    const V16 shift = set16(12582912.0f);  // 1.5 * 2^23: adding and taking it away rounds to a whole number
    V16 n = sub(fma(x, set16(1.44269504088896341f), shift), shift);
    V16 r = fma(n, set16(-0.693359375f), x);
    r = fma(n, set16(2.12194440e-4f), r);
    V16 p = set16(1.9875691500e-4f);
    p = fma(p, r, set16(1.3981999507e-3f));
    p = fma(p, r, set16(8.3334519073e-3f));
    p = fma(p, r, set16(4.1665795894e-2f));
    p = fma(p, r, set16(1.6666665459e-1f));
    p = fma(p, r, set16(5.0000001201e-1f));
    p = fma(p, mul(r, r), add(r, set16(1.0f)));
    return mul(p, power_of_two(n));
}
