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
constexpr int64_t MAX_DIM = 256;  // of a head; kernels.py refuses more
constexpr int64_t UNIT_ROWS = 64;  // query rows of a unit, about: the keys of a tile are transposed once for all of them

struct Attention {
    const float* q;  // [tokens][ldq], heads side by side
    float* out;      // [tokens][ldo]
    const int64_t* positions;
    const int64_t* tables;  // token t reads row t * table_stride
    const uint8_t* pool;    // keys [blocks][kv_heads][block_size][dim], values the same, value_offset rows later
    int64_t tokens, ldq, ldo, table_stride, table_width, blocks, value_offset;
    int64_t heads, kv_heads, dim, block_size, window, bf16;  // window 0: none
    // Few rows with long contexts: the tiles of a query are spread over ``segments`` units, which leave what they found in
    // partials [tokens][heads][tiles][2 + dim rounded up to lanes], to be merged in order by ``attend_merge``. Null: not.
    float* partials;
    int64_t segments, tiles;
    double scale;
};

INLINE int64_t unit_tokens(const Attention& a) {
    int64_t tokens = UNIT_ROWS / (a.heads / a.kv_heads);
    return a.table_stride != 0 || tokens < 1 ? 1 : tokens;  // rows of different requests share no keys
}

INLINE int64_t attention_units(const Attention& a) {
    int64_t per = unit_tokens(a);
    return (a.tokens + per - 1) / per * a.kv_heads * (a.partials == nullptr ? 1 : a.segments);
}

// Keys and values that are read, times what each takes part in; says whether waking threads is worth it. Beyond ENOUGH it
// is, and whatever a position holds, nothing overflows.
INLINE int64_t attention_work(const Attention& a) {
    constexpr int64_t ENOUGH = 1 << 14;
    int64_t positions = 0;
    for (int64_t t = 0; t < a.tokens; ++t) {
        const int64_t p = a.positions[t];
        positions += p < 0 ? 0 : p < ENOUGH ? p + 1 : ENOUGH;
    }
    return positions * a.heads * a.dim;
}

// Query rows of one unit and what is known of them so far.
struct QueryRows {
    int64_t first, tokens, group, rows, width;  // width: dim rounded up to lanes
    float *q, *scores, *part, *sum, *peak, *total, *keys, *values;
};

// Where the visible rows of a tile lie, keys and values, for one head.
struct TileRows {
    const uint8_t *key[TILE], *value[TILE];
};

// The positions of a tile that the query at ``position`` sees: [low, high), relative to the tile.
INLINE void visible(const Attention& a, int64_t position, int64_t tile, int64_t& low, int64_t& high) {
    low = a.window ? position - a.window + 1 - tile * TILE : 0;
    high = position + 1 - tile * TILE;
    low = low < 0 ? 0 : low;
    high = high > TILE ? TILE : high;
}

INLINE void find_rows(const Attention& a, const int64_t* table, int64_t head, int64_t tile, int64_t low, int64_t high,
                      TileRows& rows) {
    const int64_t size = a.dim * (a.bf16 ? 2 : 4), position = tile * TILE + low;
    int64_t index = position / a.block_size, offset = position % a.block_size;
    for (int64_t j = low; j < high; ++index, offset = 0) {
        const uint8_t* row = a.pool + ((table[index] * a.kv_heads + head) * a.block_size + offset) * size;
        for (; offset < a.block_size && j < high; ++offset, ++j, row += size) {
            rows.key[j] = row;
            rows.value[j] = row + a.value_offset * size;
        }
    }
}

// Asks for the rows of a tile before they are needed; blocks are scattered, so the hardware cannot guess them.
INLINE void prefetch_rows(const Attention& a, const TileRows& rows, int64_t low, int64_t high) {
    const int64_t size = a.dim * (a.bf16 ? 2 : 4);
    for (int64_t j = low; j < high; ++j)
        for (int64_t byte = 0; byte < size; byte += 64) {
            __builtin_prefetch(rows.key[j] + byte, 0, 3);
            __builtin_prefetch(rows.value[j] + byte, 0, 3);
        }
}

INLINE float element(const Attention& a, const uint8_t* row, int64_t i) {
    if (!a.bf16) return reinterpret_cast<const float*>(row)[i];
    return bits_to_float(uint32_t(reinterpret_cast<const uint16_t*>(row)[i]) << 16);
}

// Sixteen numbers of a row of the pool, from number i on; exact.
template <bool HALF>
INLINE V16 numbers(const uint8_t* row, int64_t i) {
    return HALF ? from_bf16(row + 2 * i) : load16(reinterpret_cast<const float*>(row) + i);
}

// Sixteen numbers of each of sixteen rows turned around.
template <bool HALF>
INLINE void transpose16(const uint8_t* const* rows, int64_t i, float* out) {
#if LANES_AVX512
    __m512 a[16], b[16];
    for (int r = 0; r < 16; ++r) a[r] = numbers<HALF>(rows[r], i).v;
    for (int r = 0; r < 16; r += 2) {
        b[r] = _mm512_unpacklo_ps(a[r], a[r + 1]);
        b[r + 1] = _mm512_unpackhi_ps(a[r], a[r + 1]);
    }
    for (int r = 0; r < 16; r += 4)
        for (int j = 0; j < 2; ++j) {
            a[r + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(b[r + j]), _mm512_castps_pd(b[r + 2 + j])));
            a[r + 2 * j + 1] =
                _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(b[r + j]), _mm512_castps_pd(b[r + 2 + j])));
        }
    for (int r = 0; r < 4; ++r) {
        b[r] = _mm512_shuffle_f32x4(a[r], a[r + 4], 0x88);
        b[r + 4] = _mm512_shuffle_f32x4(a[r], a[r + 4], 0xdd);
        b[r + 8] = _mm512_shuffle_f32x4(a[r + 8], a[r + 12], 0x88);
        b[r + 12] = _mm512_shuffle_f32x4(a[r + 8], a[r + 12], 0xdd);
    }
    for (int r = 0; r < 4; ++r) {
        _mm512_storeu_ps(out + r * LANES, _mm512_shuffle_f32x4(b[r], b[r + 8], 0x88));
        _mm512_storeu_ps(out + (r + 4) * LANES, _mm512_shuffle_f32x4(b[r + 4], b[r + 12], 0x88));
        _mm512_storeu_ps(out + (r + 8) * LANES, _mm512_shuffle_f32x4(b[r], b[r + 8], 0xdd));
        _mm512_storeu_ps(out + (r + 12) * LANES, _mm512_shuffle_f32x4(b[r + 4], b[r + 12], 0xdd));
    }
#else
    float lanes[LANES];
    for (int r = 0; r < LANES; ++r) {
        store16(lanes, numbers<HALF>(rows[r], i));
        for (int j = 0; j < LANES; ++j) out[j * LANES + r] = lanes[j];
    }
#endif
}

// Keys low .. high - 1 of a tile as panels [4][dim][16]; lanes beside them are zero.
template <bool HALF>
INLINE void pack_keys(const Attention& a, const TileRows& rows, int64_t low, int64_t high, float* out) {
    alignas(64) static const uint8_t nothing[MAX_DIM * 4] = {};
    for (int64_t panel = low / LANES; panel * LANES < high; ++panel) {
        const uint8_t* keys[LANES];
        float* place = out + panel * a.dim * LANES;
        for (int64_t lane = 0, j = panel * LANES; lane < LANES; ++lane, ++j)
            keys[lane] = j >= low && j < high ? rows.key[j] : nothing;
        int64_t i = 0;
        for (; i + LANES <= a.dim; i += LANES) transpose16<HALF>(keys, i, place + i * LANES);
        for (; i < a.dim; ++i)
            for (int64_t lane = 0; lane < LANES; ++lane) place[i * LANES + lane] = element(a, keys[lane], i);
    }
}

// Values as fp32 rows of whole vectors, where they do not lie so in the pool already.
INLINE void copy_values(const Attention& a, TileRows& rows, int64_t low, int64_t high, const QueryRows& u) {
    if (!a.bf16 && a.dim % LANES == 0) return;
    for (int64_t j = low; j < high; ++j) {
        float* place = u.values + j * u.width;
        int64_t d = 0;
        for (; a.bf16 && d + LANES <= a.dim; d += LANES) store16(place + d, from_bf16(rows.value[j] + 2 * d));
        for (; d < u.width; ++d) place[d] = d < a.dim ? element(a, rows.value[j], d) : 0.0f;
        rows.value[j] = reinterpret_cast<const uint8_t*>(place);
    }
}

// Lanes outside [from, to) become ``other``.
INLINE V16 only(V16 x, int64_t from, int64_t to, float other) {
    if (from <= 0 && to >= LANES) return x;
    float lanes[LANES];
    store16(lanes, x);
    for (int64_t i = 0; i < LANES; ++i) lanes[i] = i < from || i >= to ? other : lanes[i];
    return load16(lanes);
}

// Weights of one row of scores, in place: exp(s - peak) in [low, high), 0 elsewhere. Returns their sum.
INLINE float weigh(float* scores, int64_t low, int64_t high, float& peak) {
    V16 weights[TILE / LANES], most = set16(-INFINITY);
    for (int64_t v = 0; v < TILE / LANES; ++v) {
        weights[v] = only(load16(scores + v * LANES), low - v * LANES, high - v * LANES, -INFINITY);
        most = max(weights[v], most);
    }
    peak = largest_lane(most);
    for (int64_t v = 0; v < TILE / LANES; ++v) {
        weights[v] = only(exp16(sub(weights[v], set16(peak))), low - v * LANES, high - v * LANES, 0.0f);
        store16(scores + v * LANES, weights[v]);
    }
    return sum_lanes(add(add(weights[0], weights[1]), add(weights[2], weights[3])));
}

// R rows times V panels of values, position by position: out[r] = sum over j in [low, high) of w[r][j] v[j].
template <int R, int V>
void multiply_values(const float* w, const uint8_t* const* values, int64_t column, int64_t low, int64_t high, float* out,
                     int64_t ldo) {
    V16 acc[R][V];
    Out place{out + column, ldo, LANES, true};
    begin(acc, place);
    for (int64_t j = low; j < high; ++j) {
        const float* row = reinterpret_cast<const float*>(values[j]) + column;
        V16 value[V];
        for (int v = 0; v < V; ++v) value[v] = load16(row + v * LANES);
        for (int r = 0; r < R; ++r) {
            V16 weight = set16(w[r * TILE + j]);
            for (int v = 0; v < V; ++v) acc[r][v] = fma(weight, value[v], acc[r][v]);
        }
    }
    finish(acc, place);
}

template <int R>
INLINE void add_some(const QueryRows& u, const TileRows& rows, int64_t low, int64_t high, int64_t first) {
    const float* w = u.scores + first * TILE;
    float* out = u.part + first * u.width;
    int64_t column = 0;
#if LANES_AVX512
    for (; column + 4 * LANES <= u.width; column += 4 * LANES)
        multiply_values<R, 4>(w, rows.value, column, low, high, out, u.width);
    for (; column + 2 * LANES <= u.width; column += 2 * LANES)
        multiply_values<R, 2>(w, rows.value, column, low, high, out, u.width);
#endif
    for (; column < u.width; column += LANES) multiply_values<R, 1>(w, rows.value, column, low, high, out, u.width);
}

// part[r] = sum over j in [low, high) of w[r][j] v[j], for rows first .. first + count - 1.
INLINE void add_values(const QueryRows& u, const TileRows& rows, int64_t low, int64_t high, int64_t first, int64_t count) {
    for (; count >= 4; first += 4, count -= 4) add_some<4>(u, rows, low, high, first);
    if (count == 3) add_some<3>(u, rows, low, high, first);
    if (count == 2) add_some<2>(u, rows, low, high, first);
    if (count == 1) add_some<1>(u, rows, low, high, first);
}

// What two parts of a sum are multiplied with when they come under one peak, for sixteen queries at once.
struct Rescale {
    V16 peak, before, now;
};

INLINE Rescale rescale(V16 before, V16 now) {
    const V16 peak = max(now, before);
    return {peak, exp16(sub(before, peak)), exp16(sub(now, peak))};
}

// total = total before + part now; ``sum`` the same.
INLINE void merge_values(const float* part, float before, float now, int64_t width, float* total) {
    const V16 b = set16(before), n = set16(now);
    for (int64_t d = 0; d < width; d += LANES)
        store16(total + d, fma(load16(part + d), n, mul(load16(total + d), b)));
}

// One tile more, for one query; ``sum`` is negative before the first that it sees.
INLINE void merge(const float* part, float peak, float sum, int64_t width, float* total, float& peak_so_far, float& sum_so_far) {
    if (sum_so_far < 0) {
        sum_so_far = sum;
        peak_so_far = peak;
        std::memcpy(total, part, size_t(width) * 4);
        return;
    }
    const Rescale scale = rescale(set16(peak_so_far), set16(peak));
    float before[LANES], now[LANES], lanes[LANES];
    store16(before, scale.before), store16(now, scale.now);
    merge_values(part, before[0], now[0], width, total);
    store16(lanes, fma(set16(sum), scale.now, mul(set16(sum_so_far), scale.before)));
    sum_so_far = lanes[0];
    store16(lanes, scale.peak);
    peak_so_far = lanes[0];
}

INLINE float* partial(const Attention& a, int64_t token, int64_t head, int64_t tile, int64_t width) {
    return a.partials + ((token * a.heads + head) * a.tiles + tile) * (2 + width);
}

// What a tile gave for row r of a unit: merged at once, or left for later.
INLINE void keep(const Attention& a, const QueryRows& u, int64_t head, int64_t tile, int64_t r, float peak, float sum) {
    const float* part = u.part + r * u.width;
    if (a.partials == nullptr) {
        merge(part, peak, sum, u.width, u.total + r * u.width, u.peak[r], u.sum[r]);
        return;
    }
    float* place = partial(a, u.first + r / u.group, head * u.group + r % u.group, tile, u.width);
    place[0] = peak;
    place[1] = sum;
    std::memcpy(place + 2, part, size_t(u.width) * 4);
}

// ``merge`` for rows first .. first + count - 1, at most sixteen: the same operations, lane by lane.
INLINE void keep_some(const QueryRows& u, int64_t first, int64_t count, const float* peaks, const float* sums) {
    const Rescale scale = rescale(load16(u.peak + first, count), load16(peaks, count));
    const V16 merged = fma(load16(sums, count), scale.now, mul(load16(u.sum + first, count), scale.before));
    float peak[LANES], sum[LANES], before[LANES], now[LANES];
    store16(peak, scale.peak), store16(sum, merged), store16(before, scale.before), store16(now, scale.now);
    for (int64_t i = 0; i < count; ++i) {
        const int64_t r = first + i;
        const float* part = u.part + r * u.width;
        if (sums[i] < 0) continue;  // sees nothing of this tile
        if (u.sum[r] < 0) {         // sees its first
            merge(part, peaks[i], sums[i], u.width, u.total + r * u.width, u.peak[r], u.sum[r]);
            continue;
        }
        merge_values(part, before[i], now[i], u.width, u.total + r * u.width);
        u.peak[r] = peak[i];
        u.sum[r] = sum[i];
    }
}

// The positions of a tile that at least one query of the unit sees; whether all of them see all of it.
INLINE bool seen(const Attention& a, const QueryRows& u, int64_t tile, int64_t& low, int64_t& high) {
    low = TILE, high = 0;
    bool whole = true;
    for (int64_t t = 0; t < u.tokens; ++t) {
        int64_t from, to;
        visible(a, a.positions[u.first + t], tile, from, to);
        whole = whole && from == 0 && to == TILE;
        if (to <= from) continue;
        low = from < low ? from : low;
        high = to > high ? to : high;
    }
    return whole;
}

INLINE void attend_tile(const Attention& a, const QueryRows& u, const int64_t* table, int64_t head, int64_t tile,
                        int64_t next, TileRows& rows, TileRows& later) {
    int64_t low, high, next_low, next_high;
    const bool whole = seen(a, u, tile, low, high);
    seen(a, u, next, next_low, next_high);
    if (next_high > next_low) {
        find_rows(a, table, head, next, next_low, next_high, later);
        if (u.tokens == 1) prefetch_rows(a, later, next_low, next_high);
    }
    if (high <= low) return;
    if (a.bf16)
        pack_keys<true>(a, rows, low, high, u.keys);
    else
        pack_keys<false>(a, rows, low, high, u.keys);
    copy_values(a, rows, low, high, u);
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
                add_values(u, rows, from, to, start, r + 1 - start);
            }
        }
        if (whole) add_values(u, rows, 0, TILE, begin, end - begin);
        for (int64_t r = begin; r < end; r += LANES) {
            const int64_t some = end - r < LANES ? end - r : LANES;
            if (a.partials == nullptr && some > 1)
                keep_some(u, r, some, peaks + (r - begin), sums + (r - begin));
            else
                for (int64_t i = r; i < r + some; ++i)
                    if (!(sums[i - begin] < 0)) keep(a, u, head, tile, i, peaks[i - begin], sums[i - begin]);
        }
    }
}

INLINE bool reads_pool(const Attention& a, const int64_t* table, int64_t position) {
    if (position < 0 || position / a.block_size >= a.table_width) return false;
    for (int64_t b = 0; b <= position / a.block_size; ++b)
        if (table[b] < 0 || table[b] >= a.blocks) return false;
    return true;
}

// Between the first and the last, which ``attend`` looks at, lie all the others of a unit.
INLINE bool ascending(const int64_t* positions, int64_t count) {
    for (int64_t t = 1; t < count; ++t)
        if (positions[t - 1] > positions[t]) return false;
    return true;
}

INLINE int64_t first_tile(const Attention& a, int64_t position) {
    return a.window && position >= a.window ? (position - a.window + 1) / TILE : 0;
}

// Where the inputs lead out of the pool no memory is read, and it shows.
INLINE void write_out(const Attention& a, int64_t token, int64_t head, const float* total, float sum, bool good) {
    float* out = a.out + token * a.ldo + head * a.dim;
    for (int64_t d = 0; d < a.dim; d += LANES)
        store16(out + d, good ? div(load16(total + d), set16(sum)) : set16(NAN), a.dim - d);
}

void attend(const Attention& a, int64_t unit, Scratch& scratch) {
    const int64_t segments = a.partials == nullptr ? 1 : a.segments, segment = unit % segments;
    unit /= segments;
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
    const bool good = first >= 0 && ascending(a.positions + u.first, u.tokens) && reads_pool(a, table, last);
    for (int64_t r = 0; r < u.rows; ++r) {
        const float* q = a.q + (u.first + r / u.group) * a.ldq + (head * u.group + r % u.group) * dim;
        for (int64_t d = 0; d < dim; ++d) u.q[r * dim + d] = q[d] * float(a.scale);
        u.sum[r] = -1;
    }
    if (good) {
        TileRows places[2];
        int64_t low, high, tile = first_tile(a, first) + segment, turn = 0;
        if (tile <= last / TILE) {
            seen(a, u, tile, low, high);
            if (high > low) find_rows(a, table, head, tile, low, high, places[0]);
        }
        for (; tile <= last / TILE; tile += segments, turn ^= 1)
            attend_tile(a, u, table, head, tile, tile + segments, places[turn], places[turn ^ 1]);
    }
    if (a.partials != nullptr) return;
    for (int64_t r = 0; r < u.rows; ++r)
        write_out(a, u.first + r / u.group, head * u.group + r % u.group, u.total + r * u.width, u.sum[r], good);
}

// The second half where tiles were spread: unit is (token, query head).
void attend_merge(const Attention& a, int64_t unit, Scratch& scratch) {
    const int64_t token = unit / a.heads, head = unit % a.heads, width = (a.dim + LANES - 1) / LANES * LANES;
    const int64_t position = a.positions[token];
    const bool good = position >= 0 && reads_pool(a, a.tables + token * a.table_stride, position);
    float *total = scratch.floats(width), peak = 0, sum = -1;
    for (int64_t tile = first_tile(a, position); good && tile <= position / TILE; ++tile) {
        const float* place = partial(a, token, head, tile, width);
        merge(place + 2, place[0], place[1], width, total, peak, sum);
    }
    write_out(a, token, head, total, sum, good);
}
