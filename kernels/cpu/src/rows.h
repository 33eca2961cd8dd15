// The ops that work row by row: embedding, RMSNorm, rotary embedding and the store of K and V into their slots.
#pragma once

#include "context.h"
#include "fp8.h"
#include "quant.h"

namespace BP_NS {
namespace {

using namespace biphase;

// Sum of squares in one order for every n.
inline float sum_squares(const float* x, int n) {
    vf sum = vf{};
    int i = 0;
    for (; i + VL <= n; i += VL) {
        vf v = loadf(x + i);
        sum = fma(v, v, sum);
    }
    float total = sum_lanes(sum);
    for (; i < n; ++i) total += x[i] * x[i];
    return total;
}

inline float inverse_rms(const float* x, int n, float eps) {
    return 1.0f / std::sqrt(sum_squares(x, n) / static_cast<float>(n) + eps);
}

template <class T>
void embed(Program& program, const bp_op& op, int thread) {
    constexpr int kPerUnit = 4 / sizeof(T);
    const bp_step& step = program.step;
    program.pool->for_units(thread, step.num_tokens, [&](int row) {
        const int64_t token = step.token_ids[row];
        float* out = static_cast<float*>(op.out) + static_cast<int64_t>(row) * op.out_stride;
        const T* weight = static_cast<const T*>(op.weight);
        if (!op.packed) {
            const T* in = weight + token * op.in_stride;
            for (int i = 0; i < op.n; ++i) out[i] = to_float(in[i]) * op.scale;
            return;
        }
        if (op.format != BP_PLAIN) {
            const int64_t bytes = block_bytes(op.format);
            const char* block = static_cast<const char*>(op.weight) + token / BP_PANEL * (op.n / kBlock) * bytes;
            for (int i = 0; i < op.n; ++i) {
                const float w = decode_one(block + i / kBlock * bytes, op.format, token % BP_PANEL, i % kBlock);
                out[i] = to_float(from_float<T>(w)) * op.scale;
            }
            return;
        }
        // A packed row is one column of a panel: kPerUnit values in every 32 units.
        const T* in = weight + (token / BP_PANEL * (op.n / kPerUnit) * BP_PANEL + token % BP_PANEL) * kPerUnit;
        for (int i = 0; i < op.n; i += kPerUnit) {
            for (int j = 0; j < kPerUnit; ++j) out[i + j] = to_float(in[j]) * op.scale;
            in += BP_PANEL * kPerUnit;
        }
    });
}

template <class T>
void norm(Program& program, const bp_op& op, int thread) {
    const float* weight = static_cast<const float*>(op.weight);
    program.pool->for_units(thread, static_cast<int>(num_rows(program, op)), [&](int row) {
        const int64_t source = op.rows == BP_LOGITS_ROWS ? program.step.logits_indices[row] : row;
        const float* x = static_cast<const float*>(op.in) + source * op.in_stride;
        T* out = static_cast<T*>(op.out) + static_cast<int64_t>(row) * op.out_stride;
        const float inverse = inverse_rms(x, op.n, op.eps);
        int i = 0;
        for (; i + VL <= op.n; i += VL) store_act(out + i, loadf(x + i) * inverse * loadf(weight + i));
        for (; i < op.n; ++i) out[i] = from_float<T>(x[i] * inverse * weight[i]);
    });
}

inline void norm_add(Program& program, const bp_op& op, int thread) {
    const float* weight = static_cast<const float*>(op.weight);
    program.pool->for_units(thread, static_cast<int>(num_rows(program, op)), [&](int row) {
        const float* x = static_cast<const float*>(op.in) + static_cast<int64_t>(row) * op.in_stride;
        float* out = static_cast<float*>(op.out) + static_cast<int64_t>(row) * op.out_stride;
        const float inverse = inverse_rms(x, op.n, op.eps);
        int i = 0;
        for (; i + VL <= op.n; i += VL) storef(out + i, loadf(out + i) + loadf(x + i) * inverse * loadf(weight + i));
        for (; i < op.n; ++i) out[i] += x[i] * inverse * weight[i];
    });
}

// Half-split rotary: (x[i], x[i + half]) turn by the angle of pair i. In place.
inline void rotate(float* x, const float* table, int half) {
    int i = 0;
    for (; i + VL <= half; i += VL) {
        vf a = loadf(x + i), b = loadf(x + half + i), cosine = loadf(table + i), sine = loadf(table + half + i);
        storef(x + i, fma(a, cosine, -(b * sine)));
        storef(x + half + i, fma(b, cosine, a * sine));
    }
    for (; i < half; ++i) {
        float a = x[i], b = x[half + i], cosine = table[i], sine = table[half + i];
        x[i] = a * cosine - b * sine;
        x[half + i] = b * cosine + a * sine;
    }
}

template <class T>
inline void store_row(T* out, const float* x, int n) {
    int i = 0;
    for (; i + VL <= n; i += VL) store_act(out + i, loadf(x + i));
    for (; i < n; ++i) out[i] = from_float<T>(x[i]);
}

// First element of a token's K (part 0) or V (part 1) in a layer, for head 0.
template <class T>
inline T* cache_row(const bp_model& m, int64_t block, int layer, int part, int head, int64_t offset) {
    return static_cast<T*>(m.kv_cache) +
           ((((block * m.num_layers + layer) * 2 + part) * m.num_kv_heads + head) * m.block_size + offset) * m.head_dim;
}

template <class T>
void rope_store(Program& program, const bp_op& op, int thread) {
    const bp_model& m = program.model;
    const bp_step& step = program.step;
    const int d = m.head_dim, half = m.rotary_dim / 2;
    program.pool->for_units(thread, step.num_tokens, [&](int row) {
        const float* in = static_cast<const float*>(op.in) + static_cast<int64_t>(row) * op.in_stride;
        const float* table = op.rope + static_cast<int64_t>(step.positions[row]) * m.rotary_dim;
        const int64_t slot = step.slot_mapping[row];
        const int64_t block = slot / m.block_size, offset = slot % m.block_size;
        alignas(64) float head[1024];
        auto prepare = [&](const float* x, const float* weight) {
            if (weight) {
                const float inverse = inverse_rms(x, d, m.norm_eps);
                for (int i = 0; i < d; ++i) head[i] = x[i] * inverse * weight[i];
            } else {
                std::memcpy(head, x, sizeof(float) * d);
            }
            rotate(head, table, half);
        };
        T* q = static_cast<T*>(op.out) + static_cast<int64_t>(row) * op.out_stride;
        for (int h = 0; h < m.num_heads; ++h) {
            prepare(in + h * d, op.q_norm);
            store_row(q + h * d, head, d);
        }
        in += m.num_heads * d;
        for (int h = 0; h < m.num_kv_heads; ++h) {
            if (slot < 0) break;
            prepare(in + h * d, op.k_norm);
            const float* value = in + (m.num_kv_heads + h) * d;
            if (m.kv_dtype == BP_FP8) {
                const Fp8Run keys(m, block, op.layer, 0, h), values(m, block, op.layer, 1, h);
                encode_row(head, d, keys.codes + offset * d, keys.exponents + offset);
                encode_row(value, d, values.codes + offset * d, values.exponents + offset);
                continue;
            }
            store_row(cache_row<T>(m, block, op.layer, 0, h, offset), head, d);
            store_row(cache_row<T>(m, block, op.layer, 1, h, offset), value, d);
        }
    });
}

}  // namespace
}  // namespace BP_NS
