// Attention for many query rows, as in prefill: lanes are query rows.
//
//     S^T[key][lane] = K[key] . Q^T        A is the cache as it lies, B is Q packed once per tile
//     O^T[d][lane]  += V^T[d] . P^T        A is V, its keys in units
#pragma once

#include "attention_parts.h"
#include "transpose.h"

namespace BP_NS {
namespace {

// Tiles of kLanes rows in a unit: V is put into units of keys once for all of them.
constexpr int kTiles = 3;

// Words of scratch: Q, O and the maximum of every tile; scores, probabilities, paired values,
// decoded keys and values.
template <class T>
inline int64_t many_rows_words(const bp_model& m) {
    const int d = m.head_dim;
    return decoded_words<T>(m) + kTiles * kLanes * (d * sizeof(T) / 4 + d + 2) + kKeys * kLanes * 2 + static_cast<int64_t>(kKeys) * d;
}

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
        auto probability = [&](int key) {
            return exp2_for<T>(fma(loadf(s + key * kLanes + lane), setf(factor), -shift));
        };
        if constexpr (sizeof(T) == 4) {
            for (int key = 0; key < count; ++key) {
                storef(reinterpret_cast<float*>(p) + key * kLanes + lane, probability(key));
            }
        } else {
            for (int key = 0; key < count; key += 2) {
                vu pair = bf16_pairs(probability(key), key + 1 < count ? probability(key + 1) : vf{});
                std::memcpy(p + key / 2 * kLanes + lane, &pair, sizeof pair);
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

struct AttentionTile {
    uint32_t* q;
    float* o;
    float* maximum;
    int32_t first, count;
    alignas(64) int32_t position[kLanes];
    const uint32_t* rows[kLanes];

    int first_position() const { return position[0]; }
    int last_position() const { return position[count - 1]; }
};

// O^T, divided by the sum of probabilities, to the rows of the output. `turned`: room for kLanes vectors.
template <class T>
inline void write_tile(const AttentionTile& tile, const UnitPlace& place, const bp_op& op, const bp_model& m,
                       float* turned) {
    const int d = m.head_dim;
    for (int lane = 0; lane < tile.count; lane += VL) {
        const int lanes = tile.count - lane < VL ? tile.count - lane : VL;
        const vf inverse = 1.0f / loadf(tile.o + d * kLanes + lane);
        for (int i = 0; i < d; i += VL) {
            alignas(64) float columns[VL * VL];
            const uint32_t* rows[VL];
            const int width = d - i < VL ? d - i : VL;
            for (int j = 0; j < VL; ++j) {
                storef(columns + j * VL, j < width ? loadf(tile.o + (i + j) * kLanes + lane) * inverse : vf{});
                rows[j] = reinterpret_cast<const uint32_t*>(columns) + j * VL;
            }
            transpose_tile(rows, 0, reinterpret_cast<uint32_t*>(turned), VL);
            for (int j = 0; j < lanes; ++j) {
                T* out = place.output_row<T>(op, m, tile.first + lane + j) + i;
                if (width == VL) {
                    store_act(out, loadf(turned + j * VL));
                } else {
                    store_row(out, turned + j * VL, width);
                }
            }
        }
    }
}

template <class T>
void attend_many(const Program& program, const bp_op& op, int thread, const AttentionUnit& unit) {
    constexpr int kPerUnit = 4 / sizeof(T);
    const bp_model& m = program.model;
    const int d = m.head_dim, units = d / kPerUnit;
    const UnitPlace place(program, unit);
    uint32_t* word = reinterpret_cast<uint32_t*>(program.scratch[thread]);
    AttentionTile tiles[kTiles];
    const int num_tiles = (unit.count + kLanes - 1) / kLanes;
    for (int t = 0; t < num_tiles; ++t) {
        AttentionTile& tile = tiles[t];
        tile.q = word;
        tile.o = reinterpret_cast<float*>(word += units * kLanes);
        tile.maximum = reinterpret_cast<float*>(word += (d + 1) * kLanes);
        word += kLanes;
        tile.first = unit.first + t * kLanes;
        const int left = unit.count - t * kLanes;
        tile.count = left < kLanes ? left : kLanes;
        std::memset(tile.o, 0, sizeof(float) * (d + 1) * kLanes);
        for (int lane = 0; lane < kLanes; ++lane) {
            // Lanes past the last row repeat it; nobody reads them.
            const int row = tile.first + (lane < tile.count ? lane : tile.count - 1);
            tile.maximum[lane] = kNoScore;
            tile.position[lane] = place.position(row);
            tile.rows[lane] = reinterpret_cast<const uint32_t*>(place.query_row<T>(op, m, row));
        }
        transpose_rows(tile.rows, kLanes, units, tile.q, kLanes);
    }
    float* s = reinterpret_cast<float*>(word);
    uint32_t* p = word + kKeys * kLanes;
    uint32_t* paired = p + kKeys * kLanes;
    uint32_t* words = paired + static_cast<int64_t>(kKeys) * d;

    const int end = tiles[num_tiles - 1].last_position() + 1;
    for (int key0 = place.first_block(op.window, unit.first); key0 < end; key0 += kKeys) {
        KeyRows<T> stored, numbers;
        place.cache_rows<T>(m, op.layer, key0, end, stored);
        const KeyRows<T>& rows = decoded(m, stored, words, numbers);
        const int count = rows.count;
        if constexpr (sizeof(T) == 2) pair_values(rows.v, count, d, paired);
        for (int t = 0; t < num_tiles; ++t) {
            AttentionTile& tile = tiles[t];
            const int seen = tile.last_position() + 1 - key0;
            const int keys = seen < count ? seen : count;
            if (keys <= 0) continue;
            if (op.window > 0 && key0 + keys <= tile.first_position() - op.window + 1) continue;
            for (int i = 0; i < keys;) {
                const int run = place.run_at(key0 + i, keys - i);
                scores<T>(rows.k[i], run, tile.q, s + i * kLanes, units);
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
                    const int run = place.run_at(key0 + i, keys - i);
                    weighted_values<T>(reinterpret_cast<const uint32_t*>(rows.v[i]), run, p + i * kLanes, tile.o,
                                       d);
                    i += run;
                }
            }
        }
    }
    for (int t = 0; t < num_tiles; ++t) write_tile<T>(tiles[t], place, op, m, s);
}

}  // namespace
}  // namespace BP_NS
