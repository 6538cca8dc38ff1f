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
// The pool keeps the keys of a block turned, [dim][block_size]: where a block is made of whole panels of 16 positions, a
// product reads them as they lie. Values lie by position and are panels as they are. Both may be narrower than fp32; few
// query rows widen them in registers, many once for all. The query heads that share a K/V head, and the tokens of a unit,
// are the rows of both products.
#pragma once

#include "product.h"

constexpr int64_t TILE = 64;
constexpr int64_t MAX_DIM = 256;  // of a head; kernels.py refuses more
constexpr int64_t UNIT_ROWS = 64;  // query rows of a unit, about: a tile is found, and widened, once for all of them

struct Attention {
    const float* q;  // [tokens][ldq], heads side by side
    float* out;      // [tokens][ldo]
    const int64_t* positions;
    const int64_t* tables;  // token t reads row t * table_stride
    const uint8_t* pool;    // keys [blocks][kv_heads][dim][block_size], then values [blocks][kv_heads][block_size][dim]
    int64_t tokens, ldq, ldo, table_stride, table_width, blocks, value_offset;
    int64_t heads, kv_heads, dim, block_size, window, kind;  // window 0: none; kind of K/V: see kv_bytes
    // Few rows with long contexts: the tiles of a query are spread over ``segments`` units, which leave what they found in
    // partials [tokens][heads][tiles][2 + dim rounded up to lanes], to be merged in order by ``attend_merge``. Null: not.
    float* partials;
    int64_t segments, tiles;
    double scale;
};

// Of one number, kind 0 (fp32), 1 (bf16) or 2 (fp16).
INLINE int64_t kv_bytes(int64_t kind) { return kind == 0 ? 4 : 2; }

// Whether a block's keys are panels as they lie.
INLINE bool in_panels(const Attention& a) { return a.block_size % LANES == 0; }

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

// Where a tile's keys and values lie, for one head: panels of sixteen positions. Of keys the same number of all sixteen lies
// together, ``key_step`` bytes before the next number; of values all numbers of a position, ``value_step`` before the next.
struct Tile {
    const uint8_t *keys[TILE / LANES], *values[TILE / LANES];
    int64_t key_step, value_step;
};

// The positions of a tile that the query at ``position`` sees: [low, high), relative to the tile.
INLINE void visible(const Attention& a, int64_t position, int64_t tile, int64_t& low, int64_t& high) {
    low = a.window ? position - a.window + 1 - tile * TILE : 0;
    high = position + 1 - tile * TILE;
    low = low < 0 ? 0 : low;
    high = high > TILE ? TILE : high;
}

INLINE float element(const uint8_t* p, int64_t kind) {
    if (kind == 0) {
        float value;
        std::memcpy(&value, p, 4);
        return value;
    }
    uint16_t bits;
    std::memcpy(&bits, p, 2);
    return kind == 1 ? bits_to_float(uint32_t(bits) << 16) : half_to_float(bits);
}

// Sixteen numbers of type F32, BF16 or F16 (product.h), widened; exact.
template <class T>
INLINE V16 widened(const uint8_t* p) {
    V16 number;
    T::step(p, {}, 0, &number);
    return number;
}

INLINE V16 widened(const uint8_t* p, int64_t kind) {
    return kind == 0 ? widened<F32>(p) : kind == 1 ? widened<BF16>(p) : widened<F16>(p);
}

// Positions low .. high - 1 where they lie; for blocks of whole panels only.
INLINE Tile find_tile(const Attention& a, const int64_t* table, int64_t head, int64_t tile, int64_t low, int64_t high) {
    const int64_t size = kv_bytes(a.kind), per = a.block_size / LANES, first = tile * (TILE / LANES);
    Tile found{{}, {}, a.block_size * size, a.dim * size};
    for (int64_t p = low / LANES; p * LANES < high; ++p) {
        const int64_t row = (table[(first + p) / per] * a.kv_heads + head) * a.block_size, offset = (first + p) % per * LANES;
        found.keys[p] = a.pool + (row * a.dim + offset) * size;
        found.values[p] = a.pool + (a.value_offset + row + offset) * a.dim * size;
    }
    return found;
}

// Asks for a tile before it is needed; blocks are scattered, so the hardware cannot guess where the next one begins.
INLINE void prefetch_tile(const Attention& a, const Tile& tile, int64_t low, int64_t high) {
    const int64_t bytes = LANES * a.dim * kv_bytes(a.kind);  // of a larger block's keys: about what is read
    for (int64_t p = low / LANES; p * LANES < high; ++p) {
        prefetch(tile.keys[p], bytes);
        prefetch(tile.values[p], bytes);
    }
}

// Up to this many query rows narrow keys and values are widened in registers, beyond it once per tile.
constexpr int64_t WIDEN_ROWS = 8;

// The tile as fp32 in the unit's own memory, keys as [4][dim][16] and values as [64] rows of whole vectors.
INLINE Tile own_tile(const Attention& a, const QueryRows& u) {
    Tile own{{}, {}, LANES * 4, u.width * 4};
    for (int64_t p = 0; p < TILE / LANES; ++p) {
        own.keys[p] = reinterpret_cast<const uint8_t*>(u.keys + p * a.dim * LANES);
        own.values[p] = reinterpret_cast<const uint8_t*>(u.values + p * LANES * u.width);
    }
    return own;
}

// Keys once for many rows.
INLINE void widen_keys(const Attention& a, const Tile& from, int64_t low, int64_t high, const QueryRows& u) {
    for (int64_t p = low / LANES; p * LANES < high; ++p)
        for (int64_t d = 0; d < a.dim; ++d)
            store16(u.keys + (p * a.dim + d) * LANES, widened(from.keys[p] + d * from.key_step, a.kind));
}

// Values once for many rows, or those whose last vector is not whole.
INLINE void widen_values(const Attention& a, const Tile& from, int64_t low, int64_t high, const QueryRows& u) {
    for (int64_t j = low; j < high; ++j) {
        const uint8_t* row = from.values[j / LANES] + j % LANES * from.value_step;
        float* place = u.values + j * u.width;
        int64_t d = 0;
        for (; d + LANES <= a.dim; d += LANES) store16(place + d, widened(row + d * kv_bytes(a.kind), a.kind));
        for (; d < u.width; ++d) place[d] = d < a.dim ? element(row + d * kv_bytes(a.kind), a.kind) : 0.0f;
    }
}

// Both, number by number, where blocks are not made of whole panels.
INLINE void gather_tile(const Attention& a, const int64_t* table, int64_t head, int64_t tile, int64_t low, int64_t high,
                        const QueryRows& u) {
    const int64_t size = kv_bytes(a.kind);
    for (int64_t j = low; j < high; ++j) {
        const int64_t position = tile * TILE + j, offset = position % a.block_size;
        const int64_t row = (table[position / a.block_size] * a.kv_heads + head) * a.block_size;
        const uint8_t* key = a.pool + (row * a.dim + offset) * size;
        const uint8_t* value = a.pool + (a.value_offset + row + offset) * a.dim * size;
        for (int64_t d = 0; d < a.dim; ++d) {
            u.keys[(j / LANES * a.dim + d) * LANES + j % LANES] = element(key + d * a.block_size * size, a.kind);
            u.values[j * u.width + d] = element(value + d * size, a.kind);
        }
        for (int64_t d = a.dim; d < u.width; ++d) u.values[j * u.width + d] = 0.0f;
    }
}

// Scores of R rows with V panels of keys of type T: out[r][16 v + lane] = sum over d, ascending, of x[r][d] key[d][lane].
template <class T, int R, int V>
void multiply_keys(const float* x, int64_t dim, const uint8_t* const* panels, int64_t step, float* out) {
    V16 acc[R][V];
    Out place{out, TILE, LANES, true};
    begin(acc, place);
    for (int64_t d = 0; d < dim; ++d) {
        V16 key[V];
        for (int v = 0; v < V; ++v) key[v] = widened<T>(panels[v] + d * step);
        for (int r = 0; r < R; ++r) {
            V16 value = set16(x[r * dim + d]);
            for (int v = 0; v < V; ++v) acc[r][v] = fma(value, key[v], acc[r][v]);
        }
    }
    finish(acc, place);
}

#if LANES_AVX512
constexpr int KEY_ROWS = 8, KEY_PANELS = 2, FEW_KEY_ROWS = 4, FEW_KEY_PANELS = 4;  // at most 16 sums, at least 12 but for two rows
#elif LANES_AVX2
constexpr int KEY_ROWS = 4, KEY_PANELS = 1, FEW_KEY_ROWS = 2, FEW_KEY_PANELS = 2;
#else
constexpr int KEY_ROWS = 4, KEY_PANELS = 1, FEW_KEY_ROWS = 2, FEW_KEY_PANELS = 1;
#endif

template <class T, int V>
INLINE void multiply_keys_rows(int64_t rows, const float* x, int64_t dim, const uint8_t* const* at, int64_t step, float* out) {
    switch (rows) {
        case 1: return multiply_keys<T, 1, V>(x, dim, at, step, out);
        case 2: return multiply_keys<T, 2, V>(x, dim, at, step, out);
#if LANES_AVX512
        case 5: return multiply_keys<T, 5, V>(x, dim, at, step, out);
        case 6: return multiply_keys<T, 6, V>(x, dim, at, step, out);
        case 7: return multiply_keys<T, 7, V>(x, dim, at, step, out);
        case 8: return multiply_keys<T, 8, V>(x, dim, at, step, out);
#endif
        case 3: return multiply_keys<T, 3, V>(x, dim, at, step, out);
        case 4: return multiply_keys<T, 4, V>(x, dim, at, step, out);
    }
}

// Few rows take as many panels as they have sums for, so that the chains hide the latency of an addition.
template <class T>
INLINE void multiply_keys_few(int64_t rows, const float* x, int64_t dim, const uint8_t* const* at, int64_t step, float* out) {
    switch (rows) {
        case 1: return multiply_keys<T, 1, FEW_KEY_PANELS>(x, dim, at, step, out);
        case 2: return multiply_keys<T, 2, FEW_KEY_PANELS>(x, dim, at, step, out);
#if LANES_AVX512
        case 3: return multiply_keys<T, 3, FEW_KEY_PANELS>(x, dim, at, step, out);
        case 4: return multiply_keys<T, 4, FEW_KEY_PANELS>(x, dim, at, step, out);
#endif
    }
}

// Panels first .. end - 1 of a tile, for any number of rows.
template <class T>
INLINE void multiply_panels(const QueryRows& u, int64_t dim, const Tile& tile, int64_t first, int64_t end) {
    for (int64_t p = first; p < end;) {
        const int64_t left = end - p, few = u.rows <= FEW_KEY_ROWS && left >= FEW_KEY_PANELS;
        const int64_t panels = few ? FEW_KEY_PANELS : left < KEY_PANELS ? 1 : KEY_PANELS;
        for (int64_t r = 0; r < u.rows; r += KEY_ROWS) {
            const int64_t some = u.rows - r < KEY_ROWS ? u.rows - r : KEY_ROWS;
            float* place = u.scores + r * TILE + p * LANES;
            if (few)
                multiply_keys_few<T>(some, u.q + r * dim, dim, tile.keys + p, tile.key_step, place);
            else if (panels == 1)
                multiply_keys_rows<T, 1>(some, u.q + r * dim, dim, tile.keys + p, tile.key_step, place);
            else
                multiply_keys_rows<T, KEY_PANELS>(some, u.q + r * dim, dim, tile.keys + p, tile.key_step, place);
        }
        p += panels;
    }
}

// Scores of all rows of a unit with a tile whose keys are of ``kind``; lanes outside [low, high) are anything.
INLINE void score(const QueryRows& u, int64_t dim, const Tile& tile, int64_t kind, int64_t low, int64_t high) {
    const int64_t first = low / LANES, end = (high + LANES - 1) / LANES;
    if (kind == 1) return multiply_panels<BF16>(u, dim, tile, first, end);
    if (kind == 2) return multiply_panels<F16>(u, dim, tile, first, end);
    multiply_panels<F32>(u, dim, tile, first, end);
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

// R rows times V vectors of values of type T: out[r] = sum over j in [low, high), ascending, of w[r][j] v[j].
template <class T, int R, int V>
void multiply_values(const float* w, const Tile& tile, int64_t vector, int64_t low, int64_t high, float* out, int64_t ldo) {
    V16 acc[R][V];
    Out place{out + vector * LANES, ldo, LANES, true};
    begin(acc, place);
    for (int64_t j = low; j < high;) {
        const uint8_t* row = tile.values[j / LANES] + j % LANES * tile.value_step + vector * T::BYTES;
        const int64_t end = j / LANES * LANES + LANES, stop = end < high ? end : high;
        for (; j < stop; ++j, row += tile.value_step) {
            V16 value[V];
            for (int v = 0; v < V; ++v) value[v] = widened<T>(row + v * T::BYTES);
            for (int r = 0; r < R; ++r) {
                V16 weight = set16(w[r * TILE + j]);
                for (int v = 0; v < V; ++v) acc[r][v] = fma(weight, value[v], acc[r][v]);
            }
        }
    }
    finish(acc, place);
}

template <class T, int R>
INLINE void add_some(const QueryRows& u, const Tile& tile, int64_t low, int64_t high, int64_t first) {
    const float* w = u.scores + first * TILE;
    float* out = u.part + first * u.width;
    int64_t vector = 0, vectors = u.width / LANES;
#if LANES_AVX512
    for (; vector + 4 <= vectors; vector += 4) multiply_values<T, R, 4>(w, tile, vector, low, high, out, u.width);
    for (; vector + 2 <= vectors; vector += 2) multiply_values<T, R, 2>(w, tile, vector, low, high, out, u.width);
#endif
    for (; vector < vectors; ++vector) multiply_values<T, R, 1>(w, tile, vector, low, high, out, u.width);
}

// part[r] = sum over j in [low, high) of w[r][j] v[j], for rows first .. first + count - 1.
template <class T>
INLINE void add_values_of(const QueryRows& u, const Tile& tile, int64_t low, int64_t high, int64_t first, int64_t count) {
    for (; count >= 4; first += 4, count -= 4) add_some<T, 4>(u, tile, low, high, first);
    if (count == 3) add_some<T, 3>(u, tile, low, high, first);
    if (count == 2) add_some<T, 2>(u, tile, low, high, first);
    if (count == 1) add_some<T, 1>(u, tile, low, high, first);
}

INLINE void add_values(const QueryRows& u, const Tile& tile, int64_t kind, int64_t low, int64_t high, int64_t first,
                       int64_t count) {
    if (kind == 1) return add_values_of<BF16>(u, tile, low, high, first, count);
    if (kind == 2) return add_values_of<F16>(u, tile, low, high, first, count);
    add_values_of<F32>(u, tile, low, high, first, count);
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

// A tile as the products read it, and the kinds of its keys and values then.
struct Ready {
    Tile tile;
    int64_t keys, values;
};

INLINE Ready prepare(const Attention& a, const QueryRows& u, const int64_t* table, int64_t head, int64_t tile, int64_t low,
                     int64_t high) {
    const Tile own = own_tile(a, u);
    if (!in_panels(a)) {
        gather_tile(a, table, head, tile, low, high, u);
        return {own, 0, 0};
    }
    Ready ready{find_tile(a, table, head, tile, low, high), a.kind, a.kind};
    const bool many = a.kind != 0 && u.rows > WIDEN_ROWS;
    if (many) widen_keys(a, ready.tile, low, high, u);
    if (many || a.dim % LANES != 0) {
        widen_values(a, ready.tile, low, high, u);
        std::memcpy(ready.tile.values, own.values, sizeof own.values);
        ready.tile.value_step = own.value_step;
        ready.values = 0;
    }
    if (many) {
        std::memcpy(ready.tile.keys, own.keys, sizeof own.keys);
        ready.tile.key_step = own.key_step;
        ready.keys = 0;
    }
    return ready;
}

INLINE void attend_tile(const Attention& a, const QueryRows& u, const int64_t* table, int64_t head, int64_t tile,
                        int64_t next) {
    int64_t low, high, next_low, next_high;
    const bool whole = seen(a, u, tile, low, high);
    if (u.tokens == 1 && in_panels(a)) {
        seen(a, u, next, next_low, next_high);
        if (next_high > next_low)
            prefetch_tile(a, find_tile(a, table, head, next, next_low, next_high), next_low, next_high);
    }
    if (high <= low) return;
    const Ready ready = prepare(a, u, table, head, tile, low, high);
    score(u, a.dim, ready.tile, ready.keys, low, high);
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
                add_values(u, ready.tile, ready.values, from, to, start, r + 1 - start);
            }
        }
        if (whole) add_values(u, ready.tile, ready.values, 0, TILE, begin, end - begin);
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
        for (int64_t tile = first_tile(a, first) + segment; tile <= last / TILE; tile += segments)
            attend_tile(a, u, table, head, tile, tile + segments);
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
