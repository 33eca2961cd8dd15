// Y = A * W^T over packed weight panels, with what follows a linear layer done on the tile while it is in L1.
#pragma once

#include "context.h"
#include "micro.h"

namespace BP_NS {
namespace {

using namespace biphase;

// Rows in a work unit of a tall GEMM: enough to pay for fetching the panel, few enough to balance threads.
constexpr int kBlockRows = 96;
constexpr int kPrefetchBytes = 2048;

inline vf activate(vf x, int activation) { return activation == BP_SILU ? silu(x) : gelu_tanh(x); }

// tile: [rows][32] f32. Columns [n0, n0 + 32) of the output, of which `valid` exist.
template <class T>
inline void epilogue(const bp_op& op, const bp_step& step, const float* tile, int row0, int rows, int n0, int valid) {
    if (op.epilogue == BP_GATED) {
        int columns = valid / 2;
        T* out = static_cast<T*>(op.out) + static_cast<int64_t>(row0) * op.out_stride + n0 / 2;
        for (int r = 0; r < rows; ++r) {
            alignas(64) T result[BP_PANEL / 2];
            for (int c = 0; c < BP_PANEL / 2; c += VL) {
                vf gate = loadf(tile + r * BP_PANEL + c), up = loadf(tile + r * BP_PANEL + BP_PANEL / 2 + c);
                store_act(result + c, activate(gate, op.activation) * up);
            }
            std::memcpy(out + static_cast<int64_t>(r) * op.out_stride, result, sizeof(T) * columns);
        }
        return;
    }
    int64_t stride = op.epilogue == BP_LOGITS ? op.n : op.out_stride;
    float* out = (op.epilogue == BP_LOGITS ? step.logits : static_cast<float*>(op.out)) + row0 * stride + n0;
    for (int r = 0; r < rows; ++r, out += stride) {
        alignas(64) float spare[BP_PANEL];
        float* target = out;
        // The last panel may be narrower than its vectors: go by way of a full one.
        if (valid < BP_PANEL) {
            std::memcpy(spare, out, sizeof(float) * valid);
            for (int c = valid; c < BP_PANEL; ++c) spare[c] = 0.0f;
            target = spare;
        }
        for (int c = 0; c < BP_PANEL; c += VL) {
            vf y = loadf(tile + r * BP_PANEL + c);
            if (op.bias) y += loadf(op.bias + n0 + c);
            if (op.epilogue == BP_ADD_F32) y += loadf(target + c);
            if (op.epilogue == BP_LOGITS && op.softcap > 0.0f) y = op.softcap * tanh_of(y * (1.0f / op.softcap));
            storef(target + c, y);
        }
        if (valid < BP_PANEL) std::memcpy(out, spare, sizeof(float) * valid);
    }
}

template <class T>
void gemm(Program& program, const bp_op& op, int thread) {
    constexpr int kPerUnit = 4 / sizeof(T);
    const int64_t k = op.k / kPerUnit;
    const int64_t a_row = op.in_stride / kPerUnit;
    const int m = static_cast<int>(num_rows(program, op));
    if (m == 0) return;
    const int panels = (op.n + BP_PANEL - 1) / BP_PANEL;
    const int blocks = (m + kBlockRows - 1) / kBlockRows;
    const int block_rows = (m + blocks - 1) / blocks;
    const uint32_t* a = static_cast<const uint32_t*>(op.in);
    const uint32_t* w = static_cast<const uint32_t*>(op.weight);
    program.pool->for_units(thread, panels * blocks, [&](int unit) {
        const int panel = unit / blocks, first = unit % blocks * block_rows;
        const int last = first + block_rows < m ? first + block_rows : m;
        const int n0 = panel * BP_PANEL;
        const int valid = op.n - n0 < BP_PANEL ? op.n - n0 : BP_PANEL;
        alignas(64) float tile[kMaxRows<T> * BP_PANEL];
        for (int row = first; row < last;) {
            const int rows = next_rows<T>(last - row);
            MicroArgs args{a + row * a_row, a_row, 1, w + panel * k * BP_PANEL, BP_PANEL, k, tile, BP_PANEL, false};
            for (int c = 0; c < BP_PANEL; c += kTileColumns) {
                args.b = w + panel * k * BP_PANEL + c;
                args.c = tile + c;
                if (m <= kMaxRows<T>) {
                    micro_rows<T, NV, 1, kPrefetchBytes>(rows, args);
                } else {
                    micro_rows<T, NV, 1, 0>(rows, args);
                }
            }
            epilogue<T>(op, program.step, tile, row, rows, n0, valid);
            row += rows;
        }
    });
}

}  // namespace
}  // namespace BP_NS
