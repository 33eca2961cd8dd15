// Paged attention over ragged sequences: causal, grouped heads, sliding window, soft cap. One kernel for prefill and
// decode, by online softmax over blocks of kKeys keys at absolute positions.
//
// Lanes are query rows, (token, head of the KV head's group) pairs, so that one read of K and V serves the group:
//     S^T[key][lane] = K[key] . Q^T        A is the cache as it lies, B is Q packed once per tile
//     O^T[d][lane]  += V^T[d] . P^T        A is V, its keys in units
// A query's result depends on its own row and its sequence's K and V alone: the order of every sum is fixed by key
// position, and a masked key adds an exact zero. Slots past the end of a sequence are never read.
#pragma once

#include "micro.h"
#include "rows.h"

namespace BP_NS {
namespace {

constexpr int kKeys = 64;
constexpr int kLanes = kTileColumns;
constexpr int kGroups = 3;
constexpr float kNoScore = -1e30f;

template <class T>
struct AttentionScratch {
    // Sizes in 32-bit words.
    static int64_t query_words(int d) { return static_cast<int64_t>(d) * sizeof(T) / 4 * kLanes; }
    static int64_t output_words(int d) { return static_cast<int64_t>(d + 1) * kLanes; }
    static size_t bytes(const bp_model& m) {
        int64_t words = kGroups * (query_words(m.head_dim) + output_words(m.head_dim) + kLanes) + kKeys * kLanes * 2 +
                        static_cast<int64_t>(kKeys) * m.head_dim;
        return static_cast<size_t>(words) * 4 + 256;
    }
};

// S[key][lane] for `count` keys of one cache block, beginning at `k`.
template <class T>
inline void scores(const T* k, int count, const uint32_t* q, float* s, int units) {
    for (int row = 0; row < count;) {
        const int rows = next_rows<T>(count - row);
        MicroArgs args{reinterpret_cast<const uint32_t*>(k) + row * units, units, 1, q, kLanes, units, s + row * kLanes,
                       kLanes, false};
        micro_rows<T, NV, 1, 0>(rows, args);
        row += rows;
    }
}

// O^T += V^T P^T over `count` units of keys; v has a row of d units per unit of keys.
template <class T>
inline void weighted_values(const uint32_t* v, int count, const uint32_t* p, float* o, int d) {
    for (int row = 0; row < d;) {
        const int rows = next_rows<T>(d - row);
        MicroArgs args{v + row, 1, d, p, kLanes, count, o + row * kLanes, kLanes, true};
        micro_rows<T, NV, 0, 0>(rows, args);
        row += rows;
    }
    // The last row of O sums the probabilities, rounded as they were multiplied.
    const uint32_t one = sizeof(T) == 4 ? 0x3f800000u : 0x3f803f80u;
    MicroArgs args{&one, 0, 0, p, kLanes, count, o + d * kLanes, kLanes, true};
    micro_rows<T, NV, 0, 0>(1, args);
}

// Turns raw scores [count][kLanes] into probabilities in units at p, updates the running maximum, rescales O.
template <class T>
inline void softmax_block(float* s, uint32_t* p, int count, float scale, float softcap, float* maximum, float* o,
                          int d) {
    for (int lane = 0; lane < kLanes; lane += VL) {
        vf top = loadf(maximum + lane);
        float factor = scale * kLog2e;
        if (softcap > 0.0f) {
            factor = kLog2e;
            // A masked score is -inf, and tanh would bring it back to -softcap.
            const vf dropped = setf(-INFINITY);
            for (int key = 0; key < count; ++key) {
                vf x = loadf(s + key * kLanes + lane);
                vf y = softcap * tanh_of(x * (scale / softcap));
                storef(s + key * kLanes + lane, x == dropped ? dropped : y);
            }
        }
        vf old = top;
        for (int key = 0; key < count; ++key) top = vmax(loadf(s + key * kLanes + lane), top);
        storef(maximum + lane, top);
        const vf shift = top * factor;
        // Exactly 1 where the maximum stays, so that a block of masked keys changes nothing.
        const vf alpha = exp2_of((old - top) * factor);
        if constexpr (sizeof(T) == 4) {
            for (int key = 0; key < count; ++key) {
                vf x = exp2_of(fma(loadf(s + key * kLanes + lane), setf(factor), -shift));
                storef(reinterpret_cast<float*>(p) + key * kLanes + lane, x);
            }
        } else {
            int key = 0;
            for (; key + 2 <= count; key += 2) {
                vf x = exp2_of(fma(loadf(s + key * kLanes + lane), setf(factor), -shift));
                vf y = exp2_of(fma(loadf(s + (key + 1) * kLanes + lane), setf(factor), -shift));
                vu pair = bf16_bits(x) | (bf16_bits(y) << 16);
                std::memcpy(p + key / 2 * kLanes + lane, &pair, sizeof pair);
            }
            if (key < count) {
                vu half = bf16_bits(exp2_of(fma(loadf(s + key * kLanes + lane), setf(factor), -shift)));
                std::memcpy(p + key / 2 * kLanes + lane, &half, sizeof half);
            }
        }
        bool same = true;
        for (int i = 0; i < VL; ++i) same &= alpha[i] == 1.0f;
        if (same) continue;
        for (int row = 0; row <= d; ++row) storef(o + row * kLanes + lane, loadf(o + row * kLanes + lane) * alpha);
    }
}

inline void mask_block(float* s, int count, int first_key, int window, const int32_t* position) {
    for (int lane = 0; lane < kLanes; lane += VL) {
        const vu last = loadu(position + lane);
        const vu before = window > 0 ? last - window : setu(-1);
        for (int key = 0; key < count; ++key) {
            const vu at = setu(first_key + key);
            vf x = loadf(s + key * kLanes + lane);
            storef(s + key * kLanes + lane, (at <= last) & (at > before) ? x : setf(-INFINITY));
        }
    }
}

// Interleaves V's rows by pairs, [keys / 2][d] units; a missing last row is zero.
inline void pair_values(const bf16* const* rows, int count, int d, uint32_t* out) {
    for (int key = 0; key < count; key += 2, out += d) {
        const bf16* low = rows[key];
        const bf16* high = key + 1 < count ? rows[key + 1] : nullptr;
        int i = 0;
        for (; i + VL <= d; i += VL) {
            vu pair = __builtin_convertvector(load_as<vh>(low + i), vu);
            if (high) pair |= __builtin_convertvector(load_as<vh>(high + i), vu) << 16;
            std::memcpy(out + i, &pair, sizeof pair);
        }
        for (; i < d; ++i) out[i] = low[i] | (high ? static_cast<uint32_t>(high[i]) << 16 : 0u);
    }
}

template <class T>
struct AttentionTile {
    uint32_t* q;
    float* o;
    float* maximum;
    int32_t first, count;
    alignas(64) int32_t position[kLanes];

    int first_position() const { return position[0]; }
    int last_position() const { return position[count - 1]; }
};

template <class T>
void attend(Program& program, const bp_op& op, int thread, const AttentionUnit& unit) {
    using Scratch = AttentionScratch<T>;
    constexpr int kPerUnit = 4 / sizeof(T);
    const bp_model& m = program.model;
    const bp_step& step = program.step;
    const int d = m.head_dim, units = d / kPerUnit, group = m.num_heads / m.num_kv_heads, bs = m.block_size;
    const int32_t* table = step.block_tables + static_cast<int64_t>(unit.sequence) * step.block_table_stride;
    const int query0 = step.query_start_loc[unit.sequence];
    const int position0 =
        step.seq_lens[unit.sequence] - (step.query_start_loc[unit.sequence + 1] - query0);

    // Words of scratch, each piece a multiple of a vector.
    uint32_t* word = reinterpret_cast<uint32_t*>(program.scratch[thread]);
    AttentionTile<T> tiles[kGroups];
    const int num_tiles = (unit.count + kLanes - 1) / kLanes;
    for (int t = 0; t < num_tiles; ++t) {
        AttentionTile<T>& tile = tiles[t];
        tile.q = word;
        tile.o = reinterpret_cast<float*>(word += Scratch::query_words(d));
        tile.maximum = reinterpret_cast<float*>(word += Scratch::output_words(d));
        word += kLanes;
        tile.first = unit.first + t * kLanes;
        const int left = unit.count - t * kLanes;
        tile.count = left < kLanes ? left : kLanes;
        std::memset(tile.o, 0, sizeof(float) * Scratch::output_words(d));
        for (int lane = 0; lane < kLanes; ++lane) {
            const bool used = lane < tile.count;
            const int row = tile.first + lane;
            tile.maximum[lane] = kNoScore;
            tile.position[lane] = used ? position0 + row / group : tile.position[0];
            const T* q = static_cast<const T*>(op.in) + static_cast<int64_t>(query0 + row / group) * op.in_stride +
                         (unit.kv_head * group + row % group) * d;
            for (int i = 0; i < units; ++i) {
                uint32_t value = 0;
                if (used) std::memcpy(&value, q + i * kPerUnit, 4);
                tile.q[i * kLanes + lane] = value;
            }
        }
    }
    float* s = reinterpret_cast<float*>(word);
    uint32_t* p = word + kKeys * kLanes;
    uint32_t* paired = p + kKeys * kLanes;

    const int end = tiles[num_tiles - 1].last_position() + 1;
    int begin = op.window > 0 ? tiles[0].first_position() - op.window + 1 : 0;
    begin = begin > 0 ? begin / kKeys * kKeys : 0;
    for (int key0 = begin; key0 < end; key0 += kKeys) {
        const int count = end - key0 < kKeys ? end - key0 : kKeys;
        const T* value_rows[kKeys];
        const T* key_rows[kKeys];
        for (int i = 0; i < count; ++i) {
            const int64_t block = table[(key0 + i) / bs];
            key_rows[i] = cache_row<T>(m, block, op.layer, 0, unit.kv_head, (key0 + i) % bs);
            value_rows[i] = cache_row<T>(m, block, op.layer, 1, unit.kv_head, (key0 + i) % bs);
        }
        if constexpr (sizeof(T) == 2) pair_values(value_rows, count, d, paired);
        for (int t = 0; t < num_tiles; ++t) {
            AttentionTile<T>& tile = tiles[t];
            const int seen = tile.last_position() + 1 - key0;
            const int keys = seen < count ? seen : count;
            if (keys <= 0) continue;
            if (op.window > 0 && key0 + keys <= tile.first_position() - op.window + 1) continue;
            for (int i = 0; i < keys;) {
                const int left = bs - (key0 + i) % bs, run = left < keys - i ? left : keys - i;
                scores<T>(key_rows[i], run, tile.q, s + i * kLanes, units);
                i += run;
            }
            if (key0 + keys - 1 > tile.first_position() ||
                (op.window > 0 && key0 <= tile.last_position() - op.window)) {
                mask_block(s, keys, key0, op.window, tile.position);
            }
            softmax_block<T>(s, p, keys, op.scale, op.softcap, tile.maximum, tile.o, d);
            if constexpr (sizeof(T) == 2) {
                weighted_values<T>(paired, (keys + 1) / 2, p, tile.o, d);
            } else {
                for (int i = 0; i < keys;) {
                    const int left = bs - (key0 + i) % bs, run = left < keys - i ? left : keys - i;
                    weighted_values<T>(reinterpret_cast<const uint32_t*>(value_rows[i]), run, p + i * kLanes, tile.o,
                                       d);
                    i += run;
                }
            }
        }
    }
    for (int t = 0; t < num_tiles; ++t) {
        const AttentionTile<T>& tile = tiles[t];
        for (int lane = 0; lane < tile.count; ++lane) {
            const int row = tile.first + lane;
            T* out = static_cast<T*>(op.out) + static_cast<int64_t>(query0 + row / group) * op.out_stride +
                     (unit.kv_head * group + row % group) * d;
            const float inverse = 1.0f / tile.o[d * kLanes + lane];
            for (int i = 0; i < d; ++i) out[i] = from_float<T>(tile.o[i * kLanes + lane] * inverse);
        }
    }
}

template <class T>
void attention(Program& program, const bp_op& op, int thread) {
    program.pool->for_units(thread, program.num_units,
                            [&](int unit) { attend<T>(program, op, thread, program.units[unit]); });
}

}  // namespace
}  // namespace BP_NS
