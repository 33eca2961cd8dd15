// What both attention kernels share: where a unit's queries, keys and values lie.
#pragma once

#include "micro.h"
#include "rows.h"

namespace BP_NS {
namespace {

// Keys in a block of the online softmax, at multiples of this position whatever the query.
constexpr int kKeys = 64;
constexpr int kLanes = kTileColumns;
// Below any score; finite, so that differences of two are no NaN.
constexpr float kNoScore = -1e30f;

// Where K and V of up to kKeys keys lie. Of a cache in fp8 they are codes under another name, until `decoded`.
template <class T>
struct KeyRows {
    const T* k[kKeys];
    const T* v[kKeys];
    int count;
    // Of codes: their exponents.
    const uint8_t* k_exponent[kKeys];
    const uint8_t* v_exponent[kKeys];

    // Repeats the last row up to a multiple of VL.
    void fill() {
        for (int i = count; i % VL != 0; ++i) {
            k[i] = k[count - 1];
            v[i] = v[count - 1];
        }
    }
};

// Words that a block's decoded keys and values take.
template <class T>
inline int64_t decoded_words(const bp_model& m) {
    return m.kv_dtype == BP_FP8 ? 2 * kKeys * static_cast<int64_t>(m.head_dim) * sizeof(T) / 4 : 0;
}

// The same keys and values as numbers, those of a cache in fp8 decoded to `words`; `space` is for their addresses.
template <class T>
inline const KeyRows<T>& decoded(const bp_model& m, const KeyRows<T>& rows, uint32_t* words, KeyRows<T>& space) {
    if (m.kv_dtype != BP_FP8) return rows;
    const int d = m.head_dim;
    T* k = reinterpret_cast<T*>(words);
    T* v = k + kKeys * d;
    for (int i = 0; i < rows.count; ++i, k += d, v += d) {
        decode_row(reinterpret_cast<const uint8_t*>(rows.k[i]), fp8_factor(*rows.k_exponent[i]), d, k);
        decode_row(reinterpret_cast<const uint8_t*>(rows.v[i]), fp8_factor(*rows.v_exponent[i]), d, v);
        space.k[i] = k;
        space.v[i] = v;
    }
    space.count = rows.count;
    space.fill();
    return space;
}

// Asks for the K and V rows of a block ahead of their use, a few at a time between pieces of work: many at once would
// fill the core's miss buffers, and then wait for memory themselves.
template <class T>
struct Ahead {
    const KeyRows<T>* rows = nullptr;
    int next = 0, row_bytes = 0;

    void begin(const KeyRows<T>* of, int bytes) {
        rows = of;
        next = 0;
        row_bytes = bytes;
    }
    void some(int count) {
        if (!rows) return;
        for (; count > 0 && next < 2 * rows->count; --count, ++next) {
            const T* row = next < rows->count ? rows->k[next] : rows->v[next - rows->count];
            for (int at = 0; at < row_bytes; at += 64) __builtin_prefetch(reinterpret_cast<const char*>(row) + at, 0, 3);
        }
    }
};

// A unit's place in the batch and in the cache. A row is a (token, head of the group) pair.
struct UnitPlace {
    const int32_t* table;
    int query0, position0, group, kv_head, block_size;

    UnitPlace(const Program& program, const AttentionUnit& unit) {
        const bp_step& step = program.step;
        const int s = unit.sequence;
        table = step.block_tables + static_cast<int64_t>(s) * step.block_table_stride;
        query0 = step.query_start_loc[s];
        position0 = step.seq_lens[s] - (step.query_start_loc[s + 1] - query0);
        group = program.model.num_heads / program.model.num_kv_heads;
        kv_head = unit.kv_head;
        block_size = program.model.block_size;
    }

    int position(int row) const { return position0 + row / group; }

    // The first key of the block in which the row's window begins.
    int first_block(int window, int row) const {
        const int first = window > 0 ? position(row) - window + 1 : 0;
        return first > 0 ? first / kKeys * kKeys : 0;
    }

    template <class T>
    const T* query_row(const bp_op& op, const bp_model& m, int row) const {
        return static_cast<const T*>(op.in) + static_cast<int64_t>(query0 + row / group) * op.in_stride +
               (kv_head * group + row % group) * m.head_dim;
    }

    template <class T>
    T* output_row(const bp_op& op, const bp_model& m, int row) const {
        return static_cast<T*>(op.out) + static_cast<int64_t>(query0 + row / group) * op.out_stride +
               (kv_head * group + row % group) * m.head_dim;
    }

    // Addresses of the K and V rows of the block of keys at key0, those below `end`; the last repeated up to a multiple
    // of VL.
    template <class T>
    void cache_rows(const bp_model& m, int layer, int key0, int end, KeyRows<T>& rows) const {
        const int count = end - key0 < kKeys ? end - key0 : kKeys;
        const int64_t step = static_cast<int64_t>(m.num_kv_heads) * m.block_size * m.head_dim;
        for (int i = 0; i < count;) {
            const int offset = (key0 + i) % block_size, run = run_at(key0 + i, count - i);
            const int block = table[(key0 + i) / block_size];
            if (m.kv_dtype == BP_FP8) {
                const Fp8Run keys(m, block, layer, 0, kv_head), values(m, block, layer, 1, kv_head);
                for (int j = 0; j < run; ++j) {
                    rows.k[i + j] = reinterpret_cast<const T*>(keys.codes + (offset + j) * m.head_dim);
                    rows.v[i + j] = reinterpret_cast<const T*>(values.codes + (offset + j) * m.head_dim);
                    rows.k_exponent[i + j] = keys.exponents + offset + j;
                    rows.v_exponent[i + j] = values.exponents + offset + j;
                }
                i += run;
                continue;
            }
            const T* row = cache_row<T>(m, block, layer, 0, kv_head, offset);
            for (int j = 0; j < run; ++j, row += m.head_dim) {
                rows.k[i + j] = row;
                rows.v[i + j] = row + step;
            }
            i += run;
        }
        rows.count = count;
        rows.fill();
    }

    // Keys from `key` that lie in one cache block, `left` at most.
    int run_at(int key, int left) const {
        const int run = block_size - key % block_size;
        return run < left ? run : left;
    }
};

// Interleaves V's rows by pairs, [keys / 2][d] units; a missing last row is zero.
inline void pair_values(const bf16* const* rows, int count, int d, uint32_t* out) {
    for (int key = 0; key < count; key += 2, out += d) {
        const bf16* low = rows[key];
        const bf16* high = key + 1 < count ? rows[key + 1] : nullptr;
        int i = 0;
#if defined(__AVX512BW__)
        const __m512i first = _mm512_load_si512(kInterleave), second = _mm512_load_si512(kInterleave + 32);
        for (; i + 32 <= d; i += 32) {
            __m512i a = _mm512_loadu_si512(low + i), b = high ? _mm512_loadu_si512(high + i) : _mm512_setzero_si512();
            _mm512_storeu_si512(out + i, _mm512_permutex2var_epi16(a, first, b));
            _mm512_storeu_si512(out + i + 16, _mm512_permutex2var_epi16(a, second, b));
        }
#endif
        for (; i + VL <= d; i += VL) {
            vu pair = __builtin_convertvector(load_as<vh>(low + i), vu);
            if (high) pair |= __builtin_convertvector(load_as<vh>(high + i), vu) << 16;
            std::memcpy(out + i, &pair, sizeof pair);
        }
        for (; i < d; ++i) out[i] = low[i] | (high ? static_cast<uint32_t>(high[i]) << 16 : 0u);
    }
}

}  // namespace
}  // namespace BP_NS
