// The kernels of a decoder step, behind three C functions: pack a weight, make a pool, run a tape.
//
// A tape is an array of records of 32 eight-byte words: the kernel's number, then its arguments, addresses frozen and
// values live. Running it is one call, whoever recorded it, so a step costs no interpreter time between its kernels. No
// result depends on threads, on how many rows a call has, or on what lies beside a row.

#include "pool.h"
#include "product.h"
#include "tiles.h"
#include "attention.h"
#include "sampling.h"
#include "checksum.h"
#include "integer.h"

namespace {

enum Type : int64_t { TYPE_F32, TYPE_BF16, TYPE_F16, TYPE_Q8_0, TYPE_Q4_0, TYPE_Q4_1 };
// What a record begins with: in memory that was given back or is empty stands nothing like it.
constexpr int64_t MARK = 0x4c6f636b00000000;
enum Kind : int64_t { EMBED = MARK, NORM, LINEAR, ROTATE, ATTEND, SILU_MUL, HEAD, DRAW };

// Of --compute int8: integer.h.
enum IntegerType : int64_t { TYPE_INT8 = 16, TYPE_NIBBLES0, TYPE_NIBBLES1 };
enum IntegerKind : int64_t { QUANTISE = MARK + 16, MULTIPLY };

constexpr int64_t WORDS = 32;
constexpr int64_t SMALL = 1 << 14;  // multiply-adds or moved numbers below which nobody is woken

struct Record {
    int64_t kind;
    int64_t words[WORDS - 1];
};

// Embedding -----------------------------------------------------------------------------------------------------------

struct Embed {
    const int64_t* tokens;
    const uint8_t* w;
    int64_t type, count, n, k;
    float* out;  // [count][k]
};

template <class T>
void embed_row(const Embed& a, int64_t token, float* out) {
    const uint8_t* panel = a.w + token / LANES * (a.k / T::GROUP * T::BYTES);
    float lanes[32 * LANES];
    constexpr int64_t PIECE = T::GROUP == 1 ? 1 : 32;
    for (int64_t k = 0; k < a.k; k += PIECE) {
        expand<T>(panel, k / T::GROUP, PIECE, lanes);
        for (int64_t i = 0; i < PIECE; ++i) out[k + i] = lanes[i * LANES + token % LANES];
    }
}

#if MATRIX_TILES
template <class T>
void embed_row_tiles(const Embed& a, int64_t token, float* out) {
    tiles_row<T>(a.w + token / LANES * (a.k / LINE * T::BYTES), token % LANES, a.k, out);
}
#endif

void embed(const void* job, int64_t i, Scratch&) {
    const Embed& a = *static_cast<const Embed*>(job);
    int64_t token = a.tokens[i];
    float* out = a.out + i * a.k;
    if (token < 0 || token >= a.n) {  // not a row of the table: nothing is read, and it shows
        for (int64_t k = 0; k < a.k; ++k) out[k] = NAN;
        return;
    }
#if MATRIX_TILES
    switch (a.type) {
        case TYPE_Q8_0: return embed_row_tiles<Tiles8_0>(a, token, out);
        case TYPE_Q4_0: return embed_row_tiles<Tiles4_0>(a, token, out);
        case TYPE_Q4_1: return embed_row_tiles<Tiles4_1>(a, token, out);
    }
#endif
    switch (a.type) {
        case TYPE_F32: return embed_row<F32>(a, token, out);
        case TYPE_BF16: return embed_row<BF16>(a, token, out);
        case TYPE_F16: return embed_row<F16>(a, token, out);
        case TYPE_Q8_0: return embed_row<Q8_0>(a, token, out);
        case TYPE_Q4_0: return embed_row<Q4_0>(a, token, out);
        case TYPE_Q4_1: return embed_row<Q4_1>(a, token, out);
    }
}

// RMSNorm, with the addition to the residual stream before it ---------------------------------------------------------

// x / sqrt(mean(x ** 2) + eps) * weight; squares are summed in 16 lanes, then over the lanes.
void normalise(const float* x, const float* weight, int64_t n, float eps, float* out) {
    V16 square = zero16();
    for (int64_t i = 0; i < n; i += LANES) {
        V16 v = load16(x + i, n - i);
        square = fma(v, v, square);
    }
    V16 scale = set16(1.0f / std::sqrt(sum_lanes(square) / float(n) + eps));
    for (int64_t i = 0; i < n; i += LANES)
        store16(out + i, mul(mul(load16(x + i, n - i), scale), load16(weight + i, n - i)), n - i);
}

struct Norm {
    float* x;            // [.][n], the residual stream; x += delta where there is a delta
    const float* delta;  // [.][n] or null
    const float* weight;
    const int64_t* chosen;  // rows of x and delta, or null: row i
    float* out;             // [rows][n]
    int64_t rows, n, limit;  // limit: rows that x has
    double eps;
};

void norm(const void* job, int64_t i, Scratch&) {
    const Norm& a = *static_cast<const Norm*>(job);
    int64_t row = a.chosen == nullptr ? i : a.chosen[i];
    float* out = a.out + i * a.n;
    if (row < 0 || row >= a.limit) {
        for (int64_t k = 0; k < a.n; ++k) out[k] = NAN;
        return;
    }
    float* x = a.x + row * a.n;
    if (a.delta != nullptr && a.chosen == nullptr) {
        const float* delta = a.delta + row * a.n;
        for (int64_t k = 0; k < a.n; k += LANES)
            store16(x + k, add(load16(x + k, a.n - k), load16(delta + k, a.n - k)), a.n - k);
    } else if (a.delta != nullptr) {  // a row may be chosen twice, so the stream itself stays as it is
        const float* delta = a.delta + row * a.n;
        for (int64_t k = 0; k < a.n; k += LANES)
            store16(out + k, add(load16(x + k, a.n - k), load16(delta + k, a.n - k)), a.n - k);
        x = out;
    }
    normalise(x, a.weight, a.n, float(a.eps), out);
}

// Linear --------------------------------------------------------------------------------------------------------------

struct LinearJob {
    Linear linear;
    int64_t type;
};

int64_t panels_per_unit(const Linear& a) { return a.rows == 1 ? ALONE : PANELS; }

int64_t linear_units(const Linear& a) {
    int64_t panels = (a.n + LANES - 1) / LANES, per = panels_per_unit(a);
    return (panels + per - 1) / per;
}

void linear(const void* job, int64_t unit, Scratch& scratch) {
    const LinearJob& a = *static_cast<const LinearJob*>(job);
    int64_t panels = (a.linear.n + LANES - 1) / LANES, per = panels_per_unit(a.linear), first = unit * per;
    if (panels - first < per) per = panels - first;
    float* room = scratch.floats(tile_floats(a.linear));
    switch (a.type) {
        case TYPE_F32: return linear_tile<F32>(a.linear, first, per, room);
        case TYPE_BF16: return linear_tile<BF16>(a.linear, first, per, room);
        case TYPE_F16: return linear_tile<F16>(a.linear, first, per, room);
        case TYPE_Q8_0: return linear_tile<Q8_0>(a.linear, first, per, room);
        case TYPE_Q4_0: return linear_tile<Q4_0>(a.linear, first, per, room);
        case TYPE_Q4_1: return linear_tile<Q4_1>(a.linear, first, per, room);
    }
}

// The largest of each panel of some rows, beside the logits, while they are in the first-level cache. Null: not wanted.
void leave_peaks(const Linear& a, float* peaks, int64_t row, int64_t rows, int64_t first, int64_t end) {
    const int64_t panels = (a.n + LANES - 1) / LANES;
    for (int64_t r = row; peaks != nullptr && r < row + rows; ++r)
        for (int64_t panel = first; panel < end; ++panel)
            peaks[r * panels + panel] = peak_of(a.out + r * a.ldo + panel * LANES, a.n - panel * LANES);
}

// The head: a linear layer that leaves the peaks of its logits.
struct Head {
    LinearJob job;
    float* peaks;  // [rows][panels]
};

void head(const void* job, int64_t unit, Scratch& scratch) {
    const Head& a = *static_cast<const Head*>(job);
    const Linear& b = a.job.linear;
    linear(&a.job, unit, scratch);
    const int64_t panels = (b.n + LANES - 1) / LANES, per = panels_per_unit(b), first = unit * per;
    leave_peaks(b, a.peaks, 0, b.rows, first, first + per < panels ? first + per : panels);
}

#if MATRIX_TILES

struct TilesJob {
    LinearJob job;
    float* peaks;  // of a head, or null
    Parts x;
};

bool on_tiles(int64_t type) { return type == TYPE_Q8_0 || type == TYPE_Q4_0 || type == TYPE_Q4_1; }

void split_unit(const void* job, int64_t tile, Scratch&) {
    const TilesJob& a = *static_cast<const TilesJob*>(job);
    split_tile(a.job.linear, a.x, tile);
}

void tiles_unit(const void* job, int64_t unit, Scratch& scratch) {
    const TilesJob& a = *static_cast<const TilesJob*>(job);
    const Linear& b = a.job.linear;
    switch (a.job.type) {
        case TYPE_Q8_0: linear_tiles<Tiles8_0>(b, a.x, unit, scratch); break;
        case TYPE_Q4_0: linear_tiles<Tiles4_0>(b, a.x, unit, scratch); break;
        case TYPE_Q4_1: linear_tiles<Tiles4_1>(b, a.x, unit, scratch); break;
    }
    const Place at = tiles_place(b, a.x, unit);
    leave_peaks(b, a.peaks, at.row, at.rows, at.panel, at.panel + at.panels);
}

// Whether the job before left the parts of the same activations, and did not write to these afterwards.
bool left_by(const LinearJob* before, const Linear& a) {
    if (before == nullptr || !on_tiles(before->type)) return false;
    const Linear& b = before->linear;
    const float *x_end = a.x + (a.rows - 1) * a.ldx + a.k, *out_end = b.out + (b.rows - 1) * b.ldo + b.n;
    return b.x == a.x && b.ldx == a.ldx && b.rows == a.rows && b.k == a.k && (out_end <= a.x || x_end <= b.out);
}

void run_tiles(Pool& pool, const LinearJob& job, float* peaks, const LinearJob* before) {
    const Linear& a = job.linear;
    TilesJob tiles{job, peaks, parts_of(a)};
    settle(tiles.x, pool.shared().floats(parts_floats(tiles.x)));
    if (!left_by(before, a)) pool.run(split_unit, &tiles, tiles.x.tiles, a.rows * a.k < SMALL);
    pool.run(tiles_unit, &tiles, tiles_units(a.n, tiles.x), a.rows * a.n * a.k < SMALL);
}

#endif

// Linear layers in integers -------------------------------------------------------------------------------------------

void quantise(const void* job, int64_t row, Scratch&) { quantise_row(*static_cast<const Quantise*>(job), row); }

void multiply_units(const void* job, int64_t unit, Scratch&) {
    const Integer& a = *static_cast<const Integer*>(job);
    switch (a.type) {
        case TYPE_INT8: return integer_tile<Int8>(a, unit);
        case TYPE_NIBBLES0: return integer_tile<Nibbles0>(a, unit);
        case TYPE_NIBBLES1: return integer_tile<Nibbles1>(a, unit);
    }
}

// After the product of q, k and v: norms of heads, rotation, K/V write ------------------------------------------------

struct Rotate {
    float* qkv;  // [tokens][ld]: heads of q, of k, of v; q is left rotated here
    const int64_t* positions;
    const int64_t* slots;  // cache row of head 0 of each token
    const float* cos;      // [length][dim], sin with the sign of the rotation in its first half
    const float* sin;
    const float* q_norm;  // [dim] or null
    const float* k_norm;
    uint8_t* pool;  // one layer, see attention.h
    int64_t tokens, ld, length, heads, kv_heads, dim, block_size, value_offset, rows, kind;
    double eps;
};

void rotate_head(const float* x, const float* cos, const float* sin, int64_t dim, float* out) {
    const int64_t half = dim / 2;
    for (int64_t i = 0; i < half; ++i) {
        float first = x[i], second = x[i + half];
        out[i] = first * cos[i] + second * sin[i];
        out[i + half] = second * cos[i + half] + first * sin[i + half];
    }
}

// One number of K/V; what is finite and has no room in fp16 becomes its largest number.
INLINE void write_number(const Rotate& a, int64_t index, float x) {
    if (a.kind == 0)
        reinterpret_cast<float*>(a.pool)[index] = x;
    else
        reinterpret_cast<uint16_t*>(a.pool)[index] = a.kind == 1 ? float_to_bf16(x) : float_to_half(x);
}

// Keys of a block lie turned (attention.h).
void write_key(const Rotate& a, int64_t row, const float* x) {
    const int64_t offset = row % a.block_size, first = (row - offset) * a.dim + offset;
    for (int64_t i = 0; i < a.dim; ++i) write_number(a, first + i * a.block_size, x[i]);
}

void write_value(const Rotate& a, int64_t row, const float* x) {
    for (int64_t i = 0; i < a.dim; ++i) write_number(a, row * a.dim + i, x[i]);
}

void rotate(const void* job, int64_t token, Scratch& scratch) {
    const Rotate& a = *static_cast<const Rotate*>(job);
    float* head = scratch.floats(2 * a.dim);
    float* turned = head + a.dim;
    float* qkv = a.qkv + token * a.ld;
    int64_t position = a.positions[token], slot = a.slots[token];
    const int64_t slots = a.value_offset - (a.kv_heads - 1) * a.block_size;  // a sum with ``slot`` could overflow
    if (position < 0 || position >= a.length || slot < 0 || slot >= slots) {
        for (int64_t i = 0; i < a.heads * a.dim; ++i) qkv[i] = NAN;  // out of the pool: nothing is written, and it shows
        return;
    }
    const float *cos = a.cos + position * a.dim, *sin = a.sin + position * a.dim;
    for (int64_t h = 0; h < a.heads + a.kv_heads; ++h) {
        float* x = qkv + h * a.dim;
        const float* weight = h < a.heads ? a.q_norm : a.k_norm;
        if (weight != nullptr)
            normalise(x, weight, a.dim, float(a.eps), head);
        else
            std::memcpy(head, x, size_t(a.dim) * 4);
        rotate_head(head, cos, sin, a.dim, turned);
        if (h < a.heads)
            std::memcpy(x, turned, size_t(a.dim) * 4);
        else
            write_key(a, slot + (h - a.heads) * a.block_size, turned);
    }
    const float* values = qkv + (a.heads + a.kv_heads) * a.dim;
    for (int64_t h = 0; h < a.kv_heads; ++h)
        write_value(a, slot + h * a.block_size + a.value_offset, values + h * a.dim);
}

// SiLU(gate) * up -----------------------------------------------------------------------------------------------------

struct SiluMul {
    const float* gate_up;  // [rows][2 n]
    float* out;            // [rows][n]
    int64_t rows, n;
};

void silu_mul(const void* job, int64_t row, Scratch&) {
    const SiluMul& a = *static_cast<const SiluMul*>(job);
    const float *gate = a.gate_up + row * 2 * a.n, *up = gate + a.n;
    const V16 one = set16(1.0f);
    for (int64_t i = 0; i < a.n; i += LANES) {
        V16 g = load16(gate + i, a.n - i);
        V16 sigmoid_inverse = add(one, exp16(sub(zero16(), g)));
        store16(a.out + row * a.n + i, mul(div(g, sigmoid_inverse), load16(up + i, a.n - i)), a.n - i);
    }
}

void attend_unit(const void* job, int64_t unit, Scratch& scratch) {
    attend(*static_cast<const Attention*>(job), unit, scratch);
}

void merge_unit(const void* job, int64_t unit, Scratch& scratch) {
    attend_merge(*static_cast<const Attention*>(job), unit, scratch);
}

// The tape ------------------------------------------------------------------------------------------------------------

template <class T>
const T& arguments(const Record& record) {
    static_assert(sizeof(T) <= sizeof record.words);
    return *reinterpret_cast<const T*>(record.words);
}

// Whether there is a kernel of that kind. ``before``: the record that ran just before, or null.
bool run_one(Pool& pool, const Record& record, const Record* before) {
    const bool follows = before != nullptr && before->kind == LINEAR;
    const LinearJob* linear_before = follows ? &arguments<LinearJob>(*before) : nullptr;
    (void)linear_before;
    switch (record.kind) {
        case EMBED: {
            const auto& a = arguments<Embed>(record);
            return pool.run(embed, &a, a.count, a.count * a.k < SMALL), true;
        }
        case NORM: {
            const auto& a = arguments<Norm>(record);
            return pool.run(norm, &a, a.rows, a.rows * a.n < SMALL), true;
        }
        case LINEAR: {
            const auto& a = arguments<LinearJob>(record);
#if MATRIX_TILES
            if (on_tiles(a.type)) return run_tiles(pool, a, nullptr, linear_before), true;
#endif
            return pool.run(linear, &a, linear_units(a.linear), a.linear.rows * a.linear.n * a.linear.k < SMALL), true;
        }
        case QUANTISE: {
            const auto& a = arguments<Quantise>(record);
            return pool.run(quantise, &a, a.rows, a.rows * a.k < SMALL), true;
        }
        case MULTIPLY: {
            const auto& a = arguments<Integer>(record);
            return pool.run(multiply_units, &a, integer_units(a), a.rows * a.n * a.k < 4 * SMALL), true;
        }
        case ROTATE: {
            const auto& a = arguments<Rotate>(record);
            return pool.run(rotate, &a, a.tokens, a.tokens * a.ld < SMALL), true;
        }
        case ATTEND: {
            const auto& a = arguments<Attention>(record);
            pool.run(attend_unit, &a, attention_units(a), attention_work(a) < SMALL);
            if (a.partials != nullptr) pool.run(merge_unit, &a, a.tokens * a.heads, true);
            return true;
        }
        case SILU_MUL: {
            const auto& a = arguments<SiluMul>(record);
            return pool.run(silu_mul, &a, a.rows, a.rows * a.n < SMALL), true;
        }
        case HEAD: {
            const auto& a = arguments<Head>(record);
            const Linear& b = a.job.linear;
#if MATRIX_TILES
            if (on_tiles(a.job.type)) return run_tiles(pool, a.job, a.peaks, linear_before), true;
#endif
            return pool.run(head, &a, linear_units(b), b.rows * b.n * b.k < SMALL), true;
        }
        case DRAW: {
            const auto& a = arguments<Draw>(record);
            return pool.run(draw, &a, a.rows, heavy(a) * a.vocab < 2 * SMALL), true;
        }
    }
    return false;
}

}  // namespace

extern "C" {

// 512, 256 or 0: the vectors that this build uses.
int lockstep_vector_bits() {
#if LANES_AVX512
    return 512;
#elif LANES_AVX2
    return 256;
#else
    return 0;
#endif
}

// Whether quantised weights are packed for matrix tiles and multiplied on them: 1 or 0; -1 where the system does not let this
// process have them, which then must compute nothing.
int lockstep_tiles() {
#if MATRIX_TILES
    static const bool permitted = tiles_permitted();
    return permitted ? 1 : -1;
#else
    return 0;
#endif
}

// How a weight of a type is packed. Builds that say the same can read each other's.
const char* lockstep_layout(int64_t type) {
#if MATRIX_TILES
    if (on_tiles(type)) return "tiles";
#endif
    return type >= TYPE_INT8 ? "panels of four k" : "panels";
}

int64_t lockstep_packed_bytes(int64_t type, int64_t n, int64_t k) {
    const int64_t panels = (n + LANES - 1) / LANES;
    switch (type) {
        case TYPE_F32: return panels * k * F32::BYTES;
        case TYPE_BF16: return panels * k * BF16::BYTES;
        case TYPE_F16: return panels * k * F16::BYTES;
        case TYPE_Q8_0: return panels * (k / 32) * Q8_0::BYTES;
        case TYPE_Q4_0: return panels * (k / 32) * Q4_0::BYTES;
        case TYPE_Q4_1: return panels * (k / 32) * Q4_1::BYTES;
        case TYPE_INT8: return panels * (k / 32) * Int8::BYTES;
        case TYPE_NIBBLES0: return panels * (k / 32) * Nibbles0::BYTES;
        case TYPE_NIBBLES1: return panels * (k / 32) * Nibbles1::BYTES;
    }
    return -1;
}

void lockstep_pack(int64_t type, const uint8_t* src, int64_t n, int64_t k, uint8_t* out) {
#if MATRIX_TILES
    switch (type) {
        case TYPE_Q8_0: return pack_tiles<Tiles8_0>(src, n, k, out);
        case TYPE_Q4_0: return pack_tiles<Tiles4_0>(src, n, k, out);
        case TYPE_Q4_1: return pack_tiles<Tiles4_1>(src, n, k, out);
    }
#endif
    switch (type) {
        case TYPE_F32: return pack_floats(src, n, k, 4, out);
        case TYPE_BF16: case TYPE_F16: return pack_floats(src, n, k, 2, out);
        case TYPE_Q8_0: return pack_groups(src, n, k, 1, false, out);
        case TYPE_Q4_0: return pack_groups(src, n, k, 1, true, out);
        case TYPE_Q4_1: return pack_groups(src, n, k, 2, true, out);
        case TYPE_INT8: return pack_integer(src, n, k, 1, false, out);
        case TYPE_NIBBLES0: return pack_integer(src, n, k, 1, true, out);
        case TYPE_NIBBLES1: return pack_integer(src, n, k, 2, true, out);
    }
}

uint64_t lockstep_checksum(const uint8_t* data, int64_t size) { return checksum(data, size); }

void* lockstep_pool(int threads, const int* cpus) { return new Pool(threads < 1 ? 1 : threads, cpus); }

// How many helpers stay on the core that they were given.
int lockstep_pinned(void* pool) { return static_cast<Pool*>(pool)->pinned(); }

void lockstep_close(void* pool) { delete static_cast<Pool*>(pool); }

// How many records were run: fewer than ``count`` where one is no kernel's.
int64_t lockstep_run(void* pool, const void* tape, int64_t count) {
    Pool& threads = *static_cast<Pool*>(pool);
    std::lock_guard<std::mutex> one_at_a_time(threads.mutex());
    const Record* records = static_cast<const Record*>(tape);
    for (int64_t i = 0; i < count; ++i)
        if (!run_one(threads, records[i], i > 0 ? records + i - 1 : nullptr)) return i;
    return count;
}
}
