// Drawing one token from each row of logits: the rule of engine/compute/sampling_choice.py, answer by answer the same.
//
// The head leaves, beside its logits, the largest of every panel of 16 columns ("peaks"). So greedy rows look at a
// sixteenth of the row, and top-k, top-p, min-p and the race skip panels that cannot matter:
//
//     cut     the survivors of top-k and top-p are a prefix of the order (logit descending, id ascending), hence
//             everything above one value and, of those equal to it, the ids up to one id
//     race    token i arrives at E_i / w_i, E_i >= v_i, and v_i is its hash: with one arrival time known, a panel whose
//             peak weighs w needs a second look only where a hash is at most known * w; one compare for 16 tokens
//
// Whoever passes is scored in fp64, in the reference's operations and by the same C library, so that screening changes no
// answer. Sums are of integers. Nothing depends on other rows, on threads, or on whether the peaks were there before.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>

#include "pool.h"
#include "simd.h"

constexpr uint64_t GAMMA = 0x9E3779B97F4A7C15, MIX_1 = 0xBF58476D1CE4E5B9, MIX_2 = 0x94D049BB133111EB;
constexpr double COLD = -28.0;    // exp of it times 2^40 is below one
constexpr int64_t COLDEST = 2585;  // rint(-COLD * 64 / ln 2)
constexpr int64_t NO_TOKEN = -1, OTHER_PEAKS = -2;  // there is no finite maximum; the peaks are of other logits
constexpr double MARGIN = 1.001;  // far beyond what rounding does to an arrival time

// Peaks ---------------------------------------------------------------------------------------------------------------

INLINE bool all_finite(V16 x) {
#if LANES_AVX512
    return _mm512_fpclass_ps_mask(x.v, 0x99) == 0;  // NaN of both kinds, both infinities
#elif LANES_AVX2
    __m256 a = _mm256_sub_ps(x.a, x.a), b = _mm256_sub_ps(x.b, x.b);  // 0, or NaN of what is not finite
    return _mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_UNORD_Q)) == 0;
#else
    bool all = true;
    for (int i = 0; i < LANES; ++i) all &= std::isfinite(x.v[i]);
    return all;
#endif
}

INLINE float top_lane(V16 x) {  // of finite lanes
#if LANES_AVX512
    return _mm512_reduce_max_ps(x.v);
#elif LANES_AVX2
    __m256 m = _mm256_max_ps(x.a, x.b);
    __m128 h = _mm_max_ps(_mm256_castps256_ps128(m), _mm256_extractf128_ps(m, 1));
    h = _mm_max_ps(h, _mm_movehl_ps(h, h));
    return _mm_cvtss_f32(_mm_max_ss(h, _mm_movehdup_ps(h)));
#else
    return largest_lane(x);
#endif
}

// The largest of one panel; NaN when a value in it is not finite.
INLINE float peak_of(const float* p, int64_t n) {
    if (n >= LANES) {
        V16 x = load16(p);
        return all_finite(x) ? top_lane(x) : NAN;
    }
    float top = p[0];
    for (int64_t i = 0; i < n; ++i) {
        if (!std::isfinite(p[i])) return NAN;
        if (p[i] > top) top = p[i];
    }
    return top;
}

// One row -------------------------------------------------------------------------------------------------------------

struct Wish {  // how a row is drawn, and for which position
    uint64_t seed;
    double temperature, top_p, min_p;
    int64_t top_k, position;
};

struct Draw {
    const float* logits;
    int64_t ld, rows, vocab;
    const float* peaks;  // [rows][panels], or null: they are found here
    const Wish* wishes;  // live
    const double* weights;  // [COLDEST + 1]: 2^(40 - k / 64)
    int64_t* tokens;
};

// How many rows take more than a look at peaks that are there.
INLINE int64_t heavy(const Draw& a) {
    int64_t count = 0;
    for (int64_t i = 0; i < a.rows; ++i) count += a.peaks == nullptr || a.wishes[i].temperature > 0.0;
    return count;
}

struct Row {
    const float* logits;
    const float* peaks;  // of finite panels; -inf where a panel holds nothing else
    int64_t vocab, panels;
    double peak, temperature;
    const double* weights;
};

// Survivors: what lies above ``value``, or at it with an id of at most ``last``; and not below ``low``.
struct Cut {
    float value;
    int64_t last;
    double low;
    bool keeps(float logit, int64_t id) const {
        return (logit > value || (logit == value && id <= last)) && double(logit) >= low;
    }
};

INLINE int64_t width(const Row& row, int64_t panel) {
    int64_t left = row.vocab - panel * LANES;
    return left < LANES ? left : LANES;
}

// Whether all peaks are numbers, and then the largest of them.
inline bool top_of(const float* peaks, int64_t n, float& top) {
    int64_t whole = n / LANES * LANES;
    top = -INFINITY;
    if (whole > 0) {
        V16 best = load16(peaks);
        for (int64_t i = 0; i < whole; i += LANES) {
            V16 x = load16(peaks + i);
            if (!all_finite(x)) return false;
            best = max(x, best);
        }
        top = top_lane(best);
    }
    for (int64_t i = whole; i < n; ++i) {
        if (!std::isfinite(peaks[i])) return false;
        if (peaks[i] > top) top = peaks[i];
    }
    return true;
}

// Peaks in which minus infinity is a number like others. False where the row holds NaN or plus infinity.
inline bool exact_peaks(const float* logits, int64_t vocab, const float* given, int64_t panels, float* out, float& top) {
    top = -INFINITY;
    for (int64_t panel = 0; panel < panels; ++panel) {
        const float* p = logits + panel * LANES;
        int64_t n = vocab - panel * LANES < LANES ? vocab - panel * LANES : LANES;
        float peak = given != nullptr ? given[panel] : peak_of(p, n);
        if (std::isnan(peak)) {
            peak = -INFINITY;
            for (int64_t i = 0; i < n; ++i) {
                if (std::isnan(p[i]) || p[i] == INFINITY) return false;
                if (p[i] > peak) peak = p[i];
            }
        }
        out[panel] = peak;
        if (peak > top) top = peak;
    }
    return true;
}

// OTHER_PEAKS where no panel with that peak holds it: the peaks are not these logits'.
inline int64_t first_equal(const Row& row, float value) {
    int64_t panel = 0;
    while (panel < row.panels && row.peaks[panel] != value) ++panel;
    for (int64_t i = panel * LANES; i < row.vocab && i < (panel + 1) * LANES; ++i)
        if (row.logits[i] == value) return i;
    return OTHER_PEAKS;
}

// Survivors -----------------------------------------------------------------------------------------------------------

// The first ``count`` in the order (logit descending, id ascending). ``room``: vocab floats.
inline Cut first(const Row& row, int64_t count, double low, float* room) {
    if (count >= row.vocab) return {-INFINITY, row.vocab - 1, low};
    float least = -INFINITY;  // the count-th largest is at least the count-th largest peak
    if (count <= row.panels) {
        std::copy(row.peaks, row.peaks + row.panels, room);
        std::nth_element(room, room + count - 1, room + row.panels, std::greater<float>());
        least = room[count - 1];
    }
    int64_t found = 0;
    for (int64_t panel = 0; panel < row.panels; ++panel) {
        if (row.peaks[panel] < least) continue;
        const float* p = row.logits + panel * LANES;
        for (int64_t i = 0; i < width(row, panel); ++i)
            if (p[i] >= least) room[found++] = p[i];
    }
    if (found < count) return {-INFINITY, row.vocab - 1, low};  // with peaks of other logits only
    std::nth_element(room, room + count - 1, room + found, std::greater<float>());
    float value = room[count - 1];
    int64_t above = 0;
    for (int64_t i = 0; i < count - 1; ++i) above += room[i] > value;
    int64_t ties = count - above, last = -1;
    for (int64_t panel = 0; ties > 0 && panel < row.panels; ++panel) {
        if (row.peaks[panel] < value) continue;
        for (int64_t i = panel * LANES; ties > 0 && i < panel * LANES + width(row, panel); ++i)
            if (row.logits[i] == value) {
                last = i;
                --ties;
            }
    }
    return {value, last, low};
}

// exp((logit - peak) / temperature) times 2^40, whole: sampling_choice.weigh, operation by operation.
INLINE int64_t weigh(const Row& row, float logit) {
    double x = (double(logit) - row.peak) / row.temperature;
    x = x > COLD ? x : COLD;
    x = x < 0.0 ? x : 0.0;  // above the peak lies only what is of other logits
    double k = std::nearbyint(x * (-64.0 / 0.693147180559945309417));
    double r = x + k * (0.693147180559945309417 / 64.0);
    double p = r * (1.0 / 24.0);
    p = p + 1.0 / 6.0;
    p = p * r;
    p = p + 0.5;
    p = p * r;
    p = p + 1.0;
    p = p * r;
    p = p + 1.0;
    return int64_t(row.weights[int64_t(k)] * p);
}

// How many of the weights, heaviest first, have predecessors that weigh less than ``bound`` together. Reorders them.
inline int64_t before_bound(int64_t* begin, int64_t* end, int64_t bound) {
    int64_t taken = 0, sum = 0;
    while (begin < end) {
        int64_t pivot = begin[(end - begin) / 2];
        int64_t* equal = std::partition(begin, end, [pivot](int64_t w) { return w > pivot; });
        int64_t heavier = 0;
        for (int64_t* w = begin; w < equal; ++w) heavier += *w;
        if (sum + heavier >= bound) {
            end = equal;
            continue;
        }
        taken += equal - begin;
        sum += heavier;
        int64_t* lighter = std::partition(equal, end, [pivot](int64_t w) { return w == pivot; });
        int64_t equals = lighter - equal;
        if (pivot > 0 && sum + equals * pivot >= bound) return taken + (bound - sum + pivot - 1) / pivot;
        taken += equals;
        sum += equals * pivot;
        begin = lighter;
    }
    return taken;
}

// ``cut`` narrowed to the candidates whose predecessors hold less than ``top_p`` of the mass.
inline Cut nucleus(const Row& row, const Cut& cut, double top_p, float* room, int64_t* weights) {
    int64_t count = 0, total = 0;
    for (int64_t panel = 0; panel < row.panels; ++panel) {
        if (row.peaks[panel] < cut.value) continue;
        for (int64_t i = panel * LANES; i < panel * LANES + width(row, panel); ++i)
            if (cut.keeps(row.logits[i], i)) total += weights[count++] = weigh(row, row.logits[i]);
    }
    int64_t bound = int64_t(std::ceil(top_p * double(total)));
    // Rounding at a top_p next to one: nobody is cut. Or peaks of other logits, which leave no candidate or no mass.
    if (bound < 1 || bound > total || count == 0) return cut;
    int64_t* end = std::remove_if(weights, weights + count, [=](int64_t w) { return w < (total - bound) / count; });
    return first(row, before_bound(weights, end, bound), cut.low, room);
}

// The race ------------------------------------------------------------------------------------------------------------

INLINE uint64_t mix64(uint64_t z) {
    z = (z ^ (z >> 30)) * MIX_1;
    z = (z ^ (z >> 27)) * MIX_2;
    return z ^ (z >> 31);
}

INLINE uint64_t stream_key(uint64_t seed, int64_t position) {
    return mix64(mix64(seed + GAMMA) + (uint64_t(position) + 1) * GAMMA);
}

inline double exponential(uint64_t hash) { return -std::log1p(-((double(hash) + 0.5) * 0x1p-52)); }

// 52 bits for each of 16 ids from ``id`` on; whether one of them is at most ``limit``.
INLINE bool hash16(uint64_t key, int64_t id, uint64_t limit, uint64_t* out) {
    const uint64_t start = key + uint64_t(id + 1) * GAMMA;
    uint64_t hit = 0;
    for (uint64_t i = 0; i < uint64_t(LANES); ++i) {
        out[i] = mix64(start + i * GAMMA) >> 12;
        hit |= uint64_t(out[i] <= limit);
    }
    return hit != 0;
}

// Id of the largest (logit - peak) / temperature + gumbel among the survivors; the lowest of equals.
inline int64_t race(const Row& row, const Cut& cut, uint64_t key) {
    int64_t winner = first_equal(row, float(row.peak));  // always a survivor, and of weight one
    if (winner < 0) return winner;
    double known = exponential(mix64(key + uint64_t(winner + 1) * GAMMA) >> 12), best = -INFINITY;
    uint64_t hashes[LANES];
    for (int64_t panel = 0; panel < row.panels; ++panel) {
        const float top = row.peaks[panel];
        if (top < cut.value || double(top) < cut.low) continue;
        double x = (double(top) - row.peak) / row.temperature;
        int64_t k = x > COLD ? int64_t(x * (-64.0 / 0.693147180559945309417)) : COLDEST;  // rounds towards more weight
        double bound = known * MARGIN * row.weights[k] * 0x1p12;
        if (bound < 0.5) continue;  // the smallest uniform number is half a step
        uint64_t limit = bound < 0x1p52 ? uint64_t(bound) + 1 : uint64_t(1) << 52;
        if (!hash16(key, panel * LANES, limit, hashes)) continue;
        for (int64_t i = 0; i < width(row, panel); ++i) {
            const int64_t id = panel * LANES + i;
            const float logit = row.logits[id];
            if (hashes[i] > limit || !cut.keeps(logit, id)) continue;
            double arrival = exponential(hashes[i]), gap = (double(logit) - row.peak) / row.temperature;
            double score = gap - std::log(arrival);
            if (score > best) {
                best = score;
                winner = id;
                known = std::min(known, arrival * std::exp(-gap));
            }
        }
    }
    return winner;
}

inline int64_t choose(const Row& row, const Wish& wish, float* room, int64_t* weights) {
    Cut cut{-INFINITY, row.vocab - 1, -INFINITY};
    if (wish.top_k > 0 && wish.top_k < row.vocab) cut = first(row, wish.top_k, cut.low, room);
    if (wish.top_p > 0.0 && wish.top_p < 1.0) cut = nucleus(row, cut, wish.top_p, room, weights);
    if (wish.min_p > 0.0) cut.low = row.peak + row.temperature * std::log(wish.min_p);
    return race(row, cut, stream_key(wish.seed, wish.position));
}

inline void draw(const void* job, int64_t unit, Scratch& scratch) {
    const Draw& a = *static_cast<const Draw*>(job);
    const Wish& wish = a.wishes[unit];
    const int64_t panels = (a.vocab + LANES - 1) / LANES;
    const float* logits = a.logits + unit * a.ld;
    const float* given = a.peaks == nullptr ? nullptr : a.peaks + unit * panels;
    float* peaks = scratch.floats(panels * LANES * 4);  // panels of peaks, then vocab floats, then vocab integers
    float top;
    if (given == nullptr || !top_of(given, panels, top)) {
        if (!exact_peaks(logits, a.vocab, given, panels, peaks, top) || !std::isfinite(top)) {
            a.tokens[unit] = NO_TOKEN;  // rule 13.7
            return;
        }
        given = peaks;
    }
    const Row row{logits, given, a.vocab, panels, double(top), wish.temperature, a.weights};
    if (!(wish.temperature > 0.0)) {
        a.tokens[unit] = first_equal(row, top);
        return;
    }
    int64_t* weights = reinterpret_cast<int64_t*>(peaks + 2 * panels * LANES);
    a.tokens[unit] = choose(row, wish, peaks + panels, weights);
}
