// Attention for few query rows, as in decode: lanes are keys, then dimensions. See attention.h for the many.
//
//     S[row][key] = Q[row] . K^T[key]      B is K, transposed a block at a time
//     O[row][d]  += P[row] . V             B is V, its keys in units
// Every sum runs in the order of the other kernel, so the bits are the same.
#pragma once

#include "attention_parts.h"
#include "transpose.h"

namespace BP_NS {
namespace {

template <class T>
constexpr int kFewRows = kMaxRows<T>;

// Scores [rows][kKeys] to probabilities; row r sees keys [low[r], high[r]) of the block. alpha: what O must be scaled by.
template <class T>
inline void softmax_rows(float* s, T* p, int rows, int count, const int* low, const int* high, float scale,
                         float softcap, float* maximum, float* alpha) {
    const int padded = (count + VL - 1) / VL * VL;
    const float factor = softcap > 0.0f ? kLog2e : scale * kLog2e;
    for (int r = 0; r < rows; ++r, s += kKeys, p += kKeys) {
        if (softcap > 0.0f) {
            for (int i = 0; i < padded; i += VL) storef(s + i, softcap * tanh_of(loadf(s + i) * (scale / softcap)));
        }
        for (int i = 0; i < low[r]; ++i) s[i] = -INFINITY;
        for (int i = high[r]; i < padded; ++i) s[i] = -INFINITY;
        vf tops = loadf(s);
        for (int i = VL; i < padded; i += VL) tops = vmax(loadf(s + i), tops);
        const float old = maximum[r];
        const float highest = max_lanes(tops);
        const float top = highest > old ? highest : old;
        maximum[r] = top;
        alpha[r] = exp2_of(setf((old - top) * factor))[0];
        const vf shift = setf(top * factor);
        for (int i = 0; i < padded; i += VL) store_act(p + i, exp2_for<T>(fma(loadf(s + i), setf(factor), -shift)));
    }
}

// O[row][d] += P . V for vectors [0, d / VL) of O; v has a row of d units per unit of keys.
template <class T>
inline void weigh_rows(const T* p, int rows, const uint32_t* v, int count, float* o, int64_t o_row, int d) {
    constexpr int kPerUnit = 4 / sizeof(T);
    MicroArgs args{reinterpret_cast<const uint32_t*>(p), kKeys / kPerUnit, 1, v, d, count, o, o_row, true};
    micro_columns<T>(rows, args, d);
    // The sum of the probabilities, rounded as they were multiplied, in the vector after the last.
    alignas(64) const vu ones = setu(sizeof(T) == 4 ? 0x3f800000 : 0x3f803f80);
    args.b = reinterpret_cast<const uint32_t*>(&ones);
    args.b_k = 0;
    args.c = o + d;
    micro_rows<T, 1, 1, 0>(rows, args);
}

// Words of scratch: Q, O, transposed keys, paired values, decoded keys and values.
template <class T>
inline int64_t few_rows_words(const bp_model& m) {
    const int d = m.head_dim;
    return kFewRows<T> * (d * sizeof(T) / 4 + d + VL) + kKeys * (d * sizeof(T) / 4) + static_cast<int64_t>(kKeys) * d +
           decoded_words<T>(m);
}

// `next_unit`, or null: what this thread will probably do next.
template <class T>
void attend_few(const Program& program, const bp_op& op, int thread, const AttentionUnit& unit,
                const AttentionUnit* next_unit) {
    constexpr int kPerUnit = 4 / sizeof(T);
    const bp_model& m = program.model;
    const int d = m.head_dim, units = d / kPerUnit, rows = unit.count, o_row = d + VL;
    const UnitPlace place(program, unit);
    uint32_t* q = reinterpret_cast<uint32_t*>(program.scratch[thread]);
    float* o = reinterpret_cast<float*>(q + kFewRows<T> * units);
    uint32_t* transposed = reinterpret_cast<uint32_t*>(o + kFewRows<T> * o_row);
    uint32_t* paired = transposed + kKeys * units;
    uint32_t* words = paired + kKeys * d;
    alignas(64) float s[kFewRows<T> * kKeys];
    alignas(64) T p[kFewRows<T> * kKeys];
    float maximum[kFewRows<T>], alpha[kFewRows<T>];
    for (int r = 0; r < rows; ++r) {
        std::memcpy(q + r * units, place.query_row<T>(op, m, unit.first + r), sizeof(T) * d);
        maximum[r] = kNoScore;
    }
    std::memset(o, 0, sizeof(float) * rows * o_row);
    const int end = place.position(unit.first + rows - 1) + 1;
    const int begin = place.first_block(op.window, unit.first), row_bytes = m.kv_dtype == BP_FP8 ? d : static_cast<int>(sizeof(T)) * d;
    KeyRows<T> both[2], numbers;
    place.cache_rows<T>(m, op.layer, begin, end, both[0]);
    for (int key0 = begin, turn = 0; key0 < end; key0 += kKeys, turn ^= 1) {
        const KeyRows<T>& at = decoded(m, both[turn], words, numbers);
        const int count = at.count;
        Ahead<T> ahead;
        if (key0 + kKeys < end) {
            place.cache_rows<T>(m, op.layer, key0 + kKeys, end, both[turn ^ 1]);
            ahead.begin(&both[turn ^ 1], row_bytes);
        } else if (next_unit) {
            const UnitPlace next(program, *next_unit);
            const int last = next.position(next_unit->first + next_unit->count - 1) + 1;
            next.cache_rows<T>(m, op.layer, next.first_block(op.window, next_unit->first), last, both[turn ^ 1]);
            ahead.begin(&both[turn ^ 1], row_bytes);
        }
        const int padded = (count + VL - 1) / VL * VL;
        for (int i = 0; i < padded; i += VL) {
            ahead.some(kKeys / 4);
            transpose_rows(reinterpret_cast<const uint32_t* const*>(at.k + i), VL, units, transposed + i, kKeys);
        }
        ahead.some(kKeys / 4);
        micro_columns<T>(rows, MicroArgs{q, units, 1, transposed, kKeys, units, s, kKeys, false}, padded);
        int low[kFewRows<T>], high[kFewRows<T>];
        for (int r = 0; r < rows; ++r) {
            const int position = place.position(unit.first + r);
            const int before = op.window > 0 ? position - op.window + 1 - key0 : 0;
            high[r] = position + 1 - key0 < count ? (position + 1 - key0 > 0 ? position + 1 - key0 : 0) : count;
            low[r] = before > 0 ? (before < count ? before : count) : 0;
        }
        ahead.some(kKeys / 4);
        softmax_rows(s, p, rows, count, low, high, op.scale, op.softcap, maximum, alpha);
        for (int r = 0; r < rows; ++r) {
            if (alpha[r] == 1.0f) continue;
            for (int i = 0; i < o_row; i += VL) storef(o + r * o_row + i, loadf(o + r * o_row + i) * alpha[r]);
        }
        if constexpr (sizeof(T) == 2) {
            for (int i = 0; i < count; i += kKeys / 2) {
                ahead.some(kKeys / 4);
                const int part = count - i < kKeys / 2 ? count - i : kKeys / 2;
                pair_values(at.v + i, part, d, paired + i / 2 * d);
            }
            weigh_rows(p, rows, paired, (count + 1) / 2, o, o_row, d);
        } else {
            for (int i = 0; i < count;) {
                const int run = place.run_at(key0 + i, count - i);
                weigh_rows(p + i, rows, reinterpret_cast<const uint32_t*>(at.v[i]), run, o, o_row, d);
                i += run;
            }
        }
    }
    for (int r = 0; r < rows; ++r) {
        const float inverse = 1.0f / o[r * o_row + d];
        T* out = place.output_row<T>(op, m, unit.first + r);
        for (int i = 0; i < d; i += VL) store_act(out + i, loadf(o + r * o_row + i) * inverse);
    }
}

}  // namespace
}  // namespace BP_NS
