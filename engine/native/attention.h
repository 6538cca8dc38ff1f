// Attention over the block table in absolute tiles of 64 positions, counted from position 0.
//
//     per tile    m_t = max s[j],  w[j] = exp(s[j] - m_t),  l_t = sum w[j],  o_t = sum w[j] v[j]      j ascending
//     merged      ascending by tile:  m' = max(m, m_t),  (l, o) = (l, o) exp(m - m') + (l_t, o_t) exp(m_t - m')
//     out         o / l
//
// Which tiles and positions a query sees depends on its position and the window alone, so one-row decode, a chunk of
// prefill and recomputation add the same numbers in the same order. Hidden positions take part in no sum at all, so
// whatever lies there, NaN included, changes nothing.
//
// Both products are ``multiply`` (product.h): keys are transposed into panels of 16 positions, values are panels as they
// lie in the pool. The query heads that share a K/V head, and the tokens of a unit, are its rows.
#pragma once

#include "product.h"

constexpr int64_t TILE = 64;
constexpr int64_t UNIT_ROWS = 64;  // query rows of a unit, about: the keys of a tile are transposed once for all of them

struct Attention {
    const float* q;  // [tokens][ldq], heads side by side
    float* out;      // [tokens][ldo]
    const int64_t* positions;
    const int64_t* tables;  // token t reads row t * table_stride
    const uint8_t* pool;    // keys [blocks][kv_heads][block_size][dim], values the same, value_offset rows later
    int64_t tokens, ldq, ldo, table_stride, table_width, blocks, value_offset;
    int64_t heads, kv_heads, dim, block_size, window, bf16;  // window 0: none
    double scale;
};

INLINE int64_t unit_tokens(const Attention& a) {
    int64_t tokens = UNIT_ROWS / (a.heads / a.kv_heads);
    return a.table_stride != 0 || tokens < 1 ? 1 : tokens;  // rows of different requests share no keys
}

INLINE int64_t attention_units(const Attention& a) {
    int64_t per = unit_tokens(a);
    return (a.tokens + per - 1) / per * a.kv_heads;
}

// Query rows of one unit and what is known of them so far.
struct QueryRows {
    int64_t first, tokens, group, rows, width;  // width: dim rounded up to lanes
    float *q, *scores, *part, *sum, *peak, *total, *keys, *values;
};

// The positions of a tile that the query at ``position`` sees: [low, high), relative to the tile.
INLINE void visible(const Attention& a, int64_t position, int64_t tile, int64_t& low, int64_t& high) {
    low = a.window ? position - a.window + 1 - tile * TILE : 0;
    high = position + 1 - tile * TILE;
    low = low < 0 ? 0 : low;
    high = high > TILE ? TILE : high;
}

INLINE const uint8_t* cache_row(const Attention& a, const int64_t* table, int64_t head, int64_t position, bool value) {
    int64_t block = table[position / a.block_size];
    int64_t row = (block * a.kv_heads + head) * a.block_size + position % a.block_size + (value ? a.value_offset : 0);
    return a.pool + row * a.dim * (a.bf16 ? 2 : 4);
}

INLINE float element(const Attention& a, const uint8_t* row, int64_t i) {
    if (!a.bf16) return reinterpret_cast<const float*>(row)[i];
    return bits_to_float(uint32_t(reinterpret_cast<const uint16_t*>(row)[i]) << 16);
}

#if LANES_AVX512
// Sixteen rows of sixteen floats turned around.
INLINE void transpose16(const float* const* rows, float* out) {
    __m512 a[16], b[16];
    for (int i = 0; i < 16; ++i) a[i] = _mm512_loadu_ps(rows[i]);
    for (int i = 0; i < 16; i += 2) {
        b[i] = _mm512_unpacklo_ps(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_ps(a[i], a[i + 1]);
    }
    for (int i = 0; i < 16; i += 4)
        for (int j = 0; j < 2; ++j) {
            a[i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(b[i + j]), _mm512_castps_pd(b[i + 2 + j])));
            a[i + 2 * j + 1] =
                _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(b[i + j]), _mm512_castps_pd(b[i + 2 + j])));
        }
    for (int i = 0; i < 4; ++i) {
        b[i] = _mm512_shuffle_f32x4(a[i], a[i + 4], 0x88);
        b[i + 4] = _mm512_shuffle_f32x4(a[i], a[i + 4], 0xdd);
        b[i + 8] = _mm512_shuffle_f32x4(a[i + 8], a[i + 12], 0x88);
        b[i + 12] = _mm512_shuffle_f32x4(a[i + 8], a[i + 12], 0xdd);
    }
    for (int i = 0; i < 4; ++i) {
        _mm512_storeu_ps(out + i * LANES, _mm512_shuffle_f32x4(b[i], b[i + 8], 0x88));
        _mm512_storeu_ps(out + (i + 4) * LANES, _mm512_shuffle_f32x4(b[i + 4], b[i + 12], 0x88));
        _mm512_storeu_ps(out + (i + 8) * LANES, _mm512_shuffle_f32x4(b[i], b[i + 8], 0xdd));
        _mm512_storeu_ps(out + (i + 12) * LANES, _mm512_shuffle_f32x4(b[i + 4], b[i + 12], 0xdd));
    }
}
#else
INLINE void transpose16(const float* const* rows, float* out) {
    for (int i = 0; i < LANES; ++i)
        for (int j = 0; j < LANES; ++j) out[i * LANES + j] = rows[j][i];
}
#endif

// Keys low .. high - 1 of a tile as panels [4][dim][16]; lanes beside them are zero.
INLINE void pack_keys(const Attention& a, const int64_t* table, int64_t head, int64_t tile, int64_t low, int64_t high,
                      float* out) {
    for (int64_t panel = low / LANES; panel * LANES < high; ++panel) {
        const uint8_t* rows[LANES];
        int64_t known = 0;
        for (int64_t lane = 0; lane < LANES; ++lane) {
            int64_t j = panel * LANES + lane;
            rows[lane] = j >= low && j < high ? cache_row(a, table, head, tile * TILE + j, false) : nullptr;
            known += rows[lane] != nullptr;
        }
        float* place = out + panel * a.dim * LANES;
        int64_t i = 0;
        if (known == LANES && !a.bf16) {
            for (; i + LANES <= a.dim; i += LANES) {
                const float* parts[LANES];
                for (int lane = 0; lane < LANES; ++lane) parts[lane] = reinterpret_cast<const float*>(rows[lane]) + i;
                transpose16(parts, place + i * LANES);
            }
        }
        for (int64_t lane = 0; lane < LANES; ++lane)
            for (int64_t d = i; d < a.dim; ++d)
                place[d * LANES + lane] = rows[lane] == nullptr ? 0.0f : element(a, rows[lane], d);
    }
}

// Weights of one row of scores, in place: exp(s - peak) in [low, high), 0 elsewhere. Returns their sum.
INLINE float weigh(float* scores, int64_t low, int64_t high, float& peak) {
    peak = -INFINITY;
    for (int64_t j = low; j < high; ++j) peak = scores[j] > peak ? scores[j] : peak;
    V16 sum[4];
    for (int64_t v = 0; v < TILE / LANES; ++v) {
        float* lanes = scores + v * LANES;
        V16 weight = exp16(sub(load16(lanes), set16(peak)));
        store16(lanes, weight);
        int64_t from = low - v * LANES, to = high - v * LANES;
        if (from > 0 || to < LANES) {
            for (int64_t i = 0; i < LANES; ++i)
                if (i < from || i >= to) lanes[i] = 0.0f;
            weight = load16(lanes);
        }
        sum[v] = weight;
    }
    return sum_lanes(add(add(sum[0], sum[1]), add(sum[2], sum[3])));
}

// part[rows] = sum over j in [low, high) of w[j] v[j], cut where blocks end, which changes no bit.
INLINE void add_values(const Attention& a, const int64_t* table, int64_t head, int64_t tile, int64_t low, int64_t high,
                       const QueryRows& u, int64_t first, int64_t rows) {
    const bool direct = !a.bf16 && a.dim % LANES == 0;
    for (int64_t j = low; j < high;) {
        int64_t left = a.block_size - (tile * TILE + j) % a.block_size, count = high - j < left ? high - j : left;
        const float* values = u.values + j * u.width;
        int64_t step = u.width;
        if (direct) {
            values = reinterpret_cast<const float*>(cache_row(a, table, head, tile * TILE + j, true));
            step = a.dim;
        } else {
            count = high - j;  // the copy has no borders
        }
        multiply_all(rows, u.scores + first * TILE + j, TILE, values, LANES, step, count, u.part + first * u.width, u.width,
                     u.width, j == low);
        j += count;
    }
}

INLINE void copy_values(const Attention& a, const int64_t* table, int64_t head, int64_t tile, int64_t low, int64_t high,
                        const QueryRows& u) {
    if (!a.bf16 && a.dim % LANES == 0) return;
    for (int64_t j = low; j < high; ++j) {
        const uint8_t* row = cache_row(a, table, head, tile * TILE + j, true);
        for (int64_t d = 0; d < u.width; ++d) u.values[j * u.width + d] = d < a.dim ? element(a, row, d) : 0.0f;
    }
}

INLINE void merge(const QueryRows& u, int64_t row, float peak, float sum) {
    float* total = u.total + row * u.width;
    const float* part = u.part + row * u.width;
    if (u.sum[row] < 0) {  // the first tile that this query sees
        u.sum[row] = sum;
        u.peak[row] = peak;
        std::memcpy(total, part, size_t(u.width) * 4);
        return;
    }
    float highest = peak > u.peak[row] ? peak : u.peak[row];
    V16 before = exp16(set16(u.peak[row] - highest)), now = exp16(set16(peak - highest));
    for (int64_t d = 0; d < u.width; d += LANES)
        store16(total + d, fma(load16(part + d), now, mul(load16(total + d), before)));
    float lanes[LANES];
    store16(lanes, fma(set16(sum), now, mul(set16(u.sum[row]), before)));
    u.sum[row] = lanes[0];
    u.peak[row] = highest;
}

INLINE void attend_tile(const Attention& a, const QueryRows& u, const int64_t* table, int64_t head, int64_t tile) {
    int64_t low = TILE, high = 0;
    bool whole = true;
    for (int64_t t = 0; t < u.tokens; ++t) {
        int64_t from, to;
        visible(a, a.positions[u.first + t], tile, from, to);
        whole = whole && from == 0 && to == TILE;
        if (to <= from) continue;
        low = from < low ? from : low;
        high = to > high ? to : high;
    }
    if (high <= low) return;
    pack_keys(a, table, head, tile, low, high, u.keys);
    copy_values(a, table, head, tile, low, high, u);
    const int64_t left = low / LANES * LANES, right = (high + LANES - 1) / LANES * LANES;
    multiply_all(u.rows, u.q, a.dim, u.keys + left * a.dim, a.dim * LANES, LANES, a.dim, u.scores + left, TILE, right - left,
                 true);
    float peaks[UNIT_ROWS], sums[UNIT_ROWS];
    for (int64_t begin = 0; begin < u.rows; begin += UNIT_ROWS) {
        const int64_t end = u.rows - begin < UNIT_ROWS ? u.rows : begin + UNIT_ROWS;
        for (int64_t r = begin; r < end; ++r) {
            int64_t from, to;
            visible(a, a.positions[u.first + r / u.group], tile, from, to);
            sums[r - begin] = -1;
            if (to <= from) continue;
            sums[r - begin] = weigh(u.scores + r * TILE, from, to, peaks[r - begin]);
            // Rows of one token share their limits; they go together, as all rows do when they see the whole tile.
            int64_t token_end = (r / u.group + 1) * u.group;
            if (!whole && (r + 1 == token_end || r + 1 == end)) {
                int64_t start = r / u.group * u.group;
                start = start < begin ? begin : start;
                add_values(a, table, head, tile, from, to, u, start, r + 1 - start);
            }
        }
        if (whole) add_values(a, table, head, tile, 0, TILE, u, begin, end - begin);
        for (int64_t r = begin; r < end; ++r)
            if (sums[r - begin] >= 0 || sums[r - begin] != sums[r - begin]) merge(u, r, peaks[r - begin], sums[r - begin]);
    }
}

INLINE bool reads_pool(const Attention& a, const int64_t* table, int64_t position) {
    if (position < 0 || position / a.block_size >= a.table_width) return false;
    for (int64_t b = 0; b <= position / a.block_size; ++b)
        if (table[b] < 0 || table[b] >= a.blocks) return false;
    return true;
}

void attend(const Attention& a, int64_t unit, Scratch& scratch) {
    const int64_t per = unit_tokens(a), head = unit % a.kv_heads, dim = a.dim;
    QueryRows u;
    u.first = unit / a.kv_heads * per;
    u.tokens = a.tokens - u.first < per ? a.tokens - u.first : per;
    u.group = a.heads / a.kv_heads;
    u.rows = u.tokens * u.group;
    u.width = (dim + LANES - 1) / LANES * LANES;
    const int64_t rows = (u.rows + LANES - 1) / LANES * LANES;
    float* next = scratch.floats(rows * (2 * u.width + dim + TILE + 2) + TILE * (dim + u.width));
    auto take = [&next](int64_t count) {
        float* place = next;
        next += count;
        return place;
    };
    u.scores = take(rows * TILE), u.part = take(rows * u.width), u.total = take(rows * u.width);
    u.keys = take(TILE * dim), u.values = take(TILE * u.width), u.q = take(rows * dim);
    u.sum = take(rows), u.peak = take(rows);
    const int64_t* table = a.tables + u.first * a.table_stride;
    const int64_t last = a.positions[u.first + u.tokens - 1], first = a.positions[u.first];
    const bool good = first >= 0 && first <= last && reads_pool(a, table, last);
    for (int64_t r = 0; r < u.rows; ++r) {
        const float* q = a.q + (u.first + r / u.group) * a.ldq + (head * u.group + r % u.group) * dim;
        for (int64_t d = 0; d < dim; ++d) u.q[r * dim + d] = q[d] * float(a.scale);
        u.sum[r] = -1;
    }
    if (good) {
        int64_t from = a.window && first >= a.window ? (first - a.window + 1) / TILE : 0;
        for (int64_t tile = from; tile <= last / TILE; ++tile) attend_tile(a, u, table, head, tile);
    }
    for (int64_t r = 0; r < u.rows; ++r) {
        float* out = a.out + (u.first + r / u.group) * a.ldo + (head * u.group + r % u.group) * dim;
        V16 sum = set16(good ? u.sum[r] : NAN);  // an input that leads out of the pool: no memory is read, and it shows
        for (int64_t d = 0; d < dim; d += LANES)
            store16(out + d, div(good ? load16(u.total + r * u.width + d) : zero16(), sum), dim - d);
    }
}
