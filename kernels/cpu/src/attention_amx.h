// Attention of bfloat16 by AMX, for few query rows and many alike: one kernel, so that nothing hangs on how many.
//
//     S^T[key][lane] = K[key] . Q^T[lane]     A is the cache as it lies, B is Q turned around once
//     O[row][d]     += P[row] . V             A is P, turned around a tile at a time; B is V, its keys in pairs
//
// Lanes are query rows, 16 to a tile. A tile of keys or probabilities that the sequence does not fill is filled with
// zeros: they add an exact zero, as masked keys do.
#pragma once

#include "amx.h"
#include "attention_parts.h"
#include "transpose.h"

#if defined(__AMX_BF16__)

namespace BP_NS {
namespace {

constexpr int kAmxKeyTiles = kKeys / kAmxRows;

// Query rows of a unit, 16 at most, and what is known of them so far. Pointers go into the thread's scratch.
struct AmxRows {
    uint32_t* q;  // [units][16]
    float* o;     // [16][d]
    int32_t first, count;
    alignas(64) float maximum[VL];
    alignas(64) float sums[VL];
    alignas(64) int32_t position[VL];
};

// Tiles in a unit of rows; the same number of rows as the other kernels take.
constexpr int kAmxTiles = kLanes * 3 / VL;

inline bool attends_by_amx(const bp_model& m) { return m.head_dim % 32 == 0 && m.head_dim <= 256; }

// Words of scratch: Q and O of every tile; copied keys, paired values, decoded keys and values.
inline int64_t amx_rows_words(const bp_model& m) {
    const int64_t d = m.head_dim;
    return kAmxTiles * VL * (d / 2 + d) + kKeys * d / 2 + kKeys / 2 * d + decoded_words<bf16>(m);
}

// Raw scores [padded][16] to pairs of probabilities p [padded / 2][16]. Updates maximum and sums; alpha: what O must be
// scaled by. `padded` is a multiple of 32.
inline vf softmax_lanes(float* s, uint32_t* p, int padded, float scale, float softcap, AmxRows& rows) {
    float factor = scale * kLog2e;
    if (softcap > 0.0f) {
        factor = kLog2e;
        // A masked score is -inf, and tanh would bring it back to -softcap.
        const vf dropped = setf(-INFINITY);
        for (int key = 0; key < padded; ++key) {
            const vf x = loadf(s + key * VL);
            const vf y = softcap * tanh_of(x * (scale / softcap));
            storef(s + key * VL, x == dropped ? dropped : y);
        }
    }
    const vf old = loadf(rows.maximum);
    vf tops[4] = {old, old, old, old};
    for (int key = 0; key < padded; key += 4) {
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) tops[i] = vmax(loadf(s + (key + i) * VL), tops[i]);
    }
    const vf top = vmax(vmax(tops[0], tops[1]), vmax(tops[2], tops[3]));
    storef(rows.maximum, top);
    const vf shift = top * factor, factors = setf(factor);
    // Exactly 1 where the maximum stays, so that a block of masked keys changes nothing.
    const vf alpha = exp2_of((old - top) * factor);
    vf sum = loadf(rows.sums) * alpha;
    const vu ones = setu(0x3f803f80);
    for (int key = 0; key < padded; key += 2, s += 2 * VL, p += VL) {
        const vu pair = bf16_pairs(exp2_for<bf16>(fma(loadf(s), factors, -shift)),
                                   exp2_for<bf16>(fma(loadf(s + VL), factors, -shift)));
        std::memcpy(p, &pair, sizeof pair);
        // As they are multiplied: rounded.
        sum = dot<bf16>(sum, ones, pair);
    }
    storef(rows.sums, sum);
    return alpha;
}

// S^T of 2 or 4 tiles of keys, their rows `k_bytes` apart, for one tile of query rows.
inline void scores_amx(const bf16* const* keys, const int64_t* k_bytes, int num_keys, const uint32_t* q, int units,
                       float* s) {
    settle_memory();
    _tile_zero(0);
    _tile_zero(1);
    if (num_keys > 2) {
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int u = 0; u < units; u += kAmxUnits, q += kAmxUnits * VL) {
        _tile_loadd(6, q, VL * 4);
        _tile_loadd(4, keys[0] + 2 * u, k_bytes[0]);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(5, keys[1] + 2 * u, k_bytes[1]);
        _tile_dpbf16ps(1, 5, 6);
        if (num_keys > 2) {
            _tile_loadd(4, keys[2] + 2 * u, k_bytes[2]);
            _tile_dpbf16ps(2, 4, 6);
            _tile_loadd(5, keys[3] + 2 * u, k_bytes[3]);
            _tile_dpbf16ps(3, 5, 6);
        }
    }
    _tile_stored(0, s, VL * 4);
    _tile_stored(1, s + kAmxRows * VL, VL * 4);
    if (num_keys > 2) {
        _tile_stored(2, s + 2 * kAmxRows * VL, VL * 4);
        _tile_stored(3, s + 3 * kAmxRows * VL, VL * 4);
    }
}

// O[16][d] += P[16][2 * pairs] . V, v [pairs][d] units; pairs is 16 or 32, d a multiple of 32.
inline void weigh_amx(const uint32_t* p, int pairs, const uint32_t* v, float* o, int d) {
    const int o_bytes = d * 4, v_bytes = d * 4;
    settle_memory();
    _tile_loadd(4, p, kKeys / 2 * 4);
    if (pairs > kAmxUnits) _tile_loadd(5, p + kAmxUnits, kKeys / 2 * 4);
    for (int i = 0; i < d; i += 2 * VL) {
        _tile_loadd(0, o + i, o_bytes);
        _tile_loadd(1, o + i + VL, o_bytes);
        _tile_loadd(6, v + i, v_bytes);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, v + i + VL, v_bytes);
        _tile_dpbf16ps(1, 4, 7);
        if (pairs > kAmxUnits) {
            _tile_loadd(6, v + kAmxUnits * d + i, v_bytes);
            _tile_dpbf16ps(0, 5, 6);
            _tile_loadd(7, v + kAmxUnits * d + i + VL, v_bytes);
            _tile_dpbf16ps(1, 5, 7);
        }
        _tile_stored(0, o + i, o_bytes);
        _tile_stored(1, o + i + VL, o_bytes);
    }
}

// Where the 16 keys from i on lie, evenly apart: in the cache itself, or copied to `room` and filled up with zeros.
inline const bf16* key_tile(const KeyRows<bf16>& at, int i, int d, bf16* room, int64_t& bytes) {
    const int left = at.count - i;
    bytes = static_cast<int64_t>(sizeof(bf16)) * d;
    if (left >= kAmxRows) {
        bool even = true;
        for (int j = 1; j < kAmxRows; ++j) even &= at.k[i + j] == at.k[i] + static_cast<int64_t>(j) * d;
        if (even) return at.k[i];
    }
    for (int j = 0; j < kAmxRows; ++j, room += d) {
        if (j < left) {
            std::memcpy(room, at.k[i + j], sizeof(bf16) * d);
        } else {
            std::memset(room, 0, sizeof(bf16) * d);
        }
    }
    return room - kAmxRows * d;
}

inline void mask_lanes(float* s, int padded, int first_key, int window, const int32_t* position) {
    const vu last = loadu(position), before = window > 0 ? last - window : setu(-1);
    for (int key = 0; key < padded; ++key) {
        const vu at = setu(first_key + key);
        storef(s + key * VL, (at <= last) & (at > before) ? loadf(s + key * VL) : setf(-INFINITY));
    }
}

// `next_unit`, or null: what this thread will probably do next.
inline void attend_amx(const Program& program, const bp_op& op, int thread, const AttentionUnit& unit,
                       const AttentionUnit* next_unit) {
    const bp_model& m = program.model;
    const int d = m.head_dim, units = d / 2;
    const UnitPlace place(program, unit);
    uint32_t* word = reinterpret_cast<uint32_t*>(program.scratch[thread]);
    AmxRows tiles[kAmxTiles];
    const int num_tiles = (unit.count + VL - 1) / VL;
    for (int t = 0; t < num_tiles; ++t) {
        AmxRows& tile = tiles[t];
        tile.q = word;
        tile.o = reinterpret_cast<float*>(word += units * VL);
        word += d * VL;
        tile.first = unit.first + t * VL;
        tile.count = unit.count - t * VL < VL ? unit.count - t * VL : VL;
        std::memset(tile.o, 0, sizeof(float) * d * VL);
        const uint32_t* rows[VL];
        for (int lane = 0; lane < VL; ++lane) {
            // Lanes past the last row repeat it; nobody reads them.
            const int row = tile.first + (lane < tile.count ? lane : tile.count - 1);
            tile.maximum[lane] = kNoScore;
            tile.sums[lane] = 0.0f;
            tile.position[lane] = place.position(row);
            rows[lane] = reinterpret_cast<const uint32_t*>(place.query_row<bf16>(op, m, row));
        }
        transpose_rows(rows, VL, units, tile.q, VL);
    }
    bf16* room = reinterpret_cast<bf16*>(word);
    uint32_t* paired = word + kKeys * units;
    uint32_t* words = paired + kKeys / 2 * d;
    alignas(64) float s[kKeys * VL];
    alignas(64) uint32_t pairs[kKeys / 2 * VL];
    alignas(64) uint32_t p[VL * kKeys / 2];

    const AmxRows& last_tile = tiles[num_tiles - 1];
    const int end = last_tile.position[last_tile.count - 1] + 1;
    const int begin = place.first_block(op.window, unit.first);
    const int row_bytes = m.kv_dtype == BP_FP8 ? d : 2 * d;
    KeyRows<bf16> both[2], numbers;
    place.cache_rows<bf16>(m, op.layer, begin, end, both[0]);
    for (int key0 = begin, turn = 0; key0 < end; key0 += kKeys, turn ^= 1) {
        const KeyRows<bf16>& at = decoded(m, both[turn], words, numbers);
        const int count = at.count, padded = count > kKeys / 2 ? kKeys : kKeys / 2;
        Ahead<bf16> ahead;
        if (key0 + kKeys < end) {
            place.cache_rows<bf16>(m, op.layer, key0 + kKeys, end, both[turn ^ 1]);
            ahead.begin(&both[turn ^ 1], row_bytes);
        } else if (next_unit) {
            const UnitPlace next(program, *next_unit);
            const int last = next.position(next_unit->first + next_unit->count - 1) + 1;
            next.cache_rows<bf16>(m, op.layer, next.first_block(op.window, next_unit->first), last, both[turn ^ 1]);
            ahead.begin(&both[turn ^ 1], row_bytes);
        }
        const bf16* keys[kAmxKeyTiles];
        int64_t k_bytes[kAmxKeyTiles];
        for (int i = 0; i < padded / kAmxRows; ++i) {
            keys[i] = key_tile(at, i * kAmxRows, d, room + i * kAmxRows * d, k_bytes[i]);
        }
        ahead.some(kKeys / 4);
        const int num_pairs = (count + 1) / 2;
        pair_values(at.v, count, d, paired);
        std::memset(paired + num_pairs * d, 0, sizeof(uint32_t) * (padded / 2 - num_pairs) * d);
        ahead.some(kKeys / 4);
        for (int t = 0; t < num_tiles; ++t) {
            AmxRows& tile = tiles[t];
            const int first_position = tile.position[0], last_position = tile.position[tile.count - 1];
            if (last_position < key0) continue;
            if (op.window > 0 && key0 + count <= first_position - op.window + 1) continue;
            scores_amx(keys, k_bytes, padded / kAmxRows, tile.q, units, s);
            ahead.some(kKeys / 4);
            if (key0 + padded - 1 > first_position || (op.window > 0 && key0 <= last_position - op.window)) {
                mask_lanes(s, padded, key0, op.window, tile.position);
            }
            alignas(64) float alpha[VL];
            storef(alpha, softmax_lanes(s, pairs, padded, op.scale, op.softcap, tile));
            ahead.some(kKeys / 4);
            const uint32_t* rows[VL];
            for (int i = 0; i < padded / 2; i += VL) {
                for (int j = 0; j < VL; ++j) rows[j] = pairs + (i + j) * VL;
                transpose_tile(rows, 0, p + i, kKeys / 2);
            }
            for (int r = 0; r < tile.count; ++r) {
                if (alpha[r] == 1.0f) continue;
                for (int i = 0; i < d; i += VL) storef(tile.o + r * d + i, loadf(tile.o + r * d + i) * alpha[r]);
            }
            ahead.some(kKeys / 4);
            weigh_amx(p, padded / 2, paired, tile.o, d);
        }
        ahead.some(2 * kKeys);
    }
    for (int t = 0; t < num_tiles; ++t) {
        const AmxRows& tile = tiles[t];
        for (int r = 0; r < tile.count; ++r) {
            const float inverse = 1.0f / tile.sums[r];
            bf16* out = place.output_row<bf16>(op, m, tile.first + r);
            for (int i = 0; i < d; i += VL) store_act(out + i, loadf(tile.o + r * d + i) * inverse);
        }
    }
}

}  // namespace
}  // namespace BP_NS

#endif
