// Y = A * W^T over packed weight panels, with what follows a linear layer done on the tile while it is in L1.
#pragma once

#include "amx.h"
#include "context.h"
#include "micro.h"
#include "quant.h"

namespace BP_NS {
namespace {

using namespace biphase;

// Rows in a work unit of a tall GEMM: enough to pay for fetching the panel, few enough to balance threads.
constexpr int kBlockRows = 96;
// Likewise where the panel must be decoded as well.
constexpr int kQuantisedBlockRows = 256;
// Blocks decoded at once for few rows.
constexpr int kDecodedBlocks = 6;
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

// A work unit's rows [first, last) of one panel, given as units of k. `single`: B passes once, from memory.
template <class T>
inline void multiply_panel(const uint32_t* a, int64_t a_row, const uint32_t* panel, int64_t k,
                           float* tile, int rows, bool accumulate, bool single) {
    MicroArgs args{a, a_row, 1, panel, BP_PANEL, k, tile, BP_PANEL, accumulate};
    for (int c = 0; c < BP_PANEL; c += kTileColumns) {
        args.b = panel + c;
        args.c = tile + c;
        if (single) {
            micro_rows<T, NV, 1, kPrefetchBytes>(rows, args);
        } else {
            micro_rows<T, NV, 1, 0>(rows, args);
        }
    }
}

#if defined(__AMX_BF16__)
// All bfloat16 products of this instruction set are made here, so that their bits never depend on the number of rows.
inline void gemm_amx(Program& program, const bp_op& op, int thread) {
    const int64_t units = op.k / 2, a_row = op.in_stride / 2;
    const int m = static_cast<int>(num_rows(program, op));
    if (m == 0) return;
    const bool quantised = op.format != BP_PLAIN, single = m <= kAmxBlockRows;
    const int panels = (op.n + BP_PANEL - 1) / BP_PANEL;
    const int most_rows = quantised ? kQuantisedBlockRows : kBlockRows;
    const int blocks = (m + most_rows - 1) / most_rows;
    // Whole tiles, as far as they go.
    const int block_rows = ((m + blocks - 1) / blocks + kAmxBlockRows - 1) / kAmxBlockRows * kAmxBlockRows;
    const int64_t panel_bytes = quantised ? op.k / kBlock * block_bytes(op.format) : units * BP_PANEL * 4;
    const uint32_t* a = static_cast<const uint32_t*>(op.in);
    bf16* decoded = reinterpret_cast<bf16*>(program.scratch[thread]);
    program.pool->for_units(thread, panels * blocks, [&](int unit) {
        const int first = unit % blocks * block_rows, last = first + block_rows < m ? first + block_rows : m;
        const int n0 = unit / blocks * BP_PANEL, valid = op.n - n0 < BP_PANEL ? op.n - n0 : BP_PANEL;
        const char* packed = static_cast<const char*>(op.weight) + unit / blocks * panel_bytes;
        const uint32_t* panel = reinterpret_cast<const uint32_t*>(packed);
        alignas(64) float tile[kAmxBlockRows * BP_PANEL];
        if (quantised && !single) {
            decode_panel(packed, op.format, op.k / kBlock, decoded);
            panel = reinterpret_cast<const uint32_t*>(decoded);
        }
        for (int row = first; row < last; row += kAmxBlockRows) {
            const int rows = last - row < kAmxBlockRows ? last - row : kAmxBlockRows;
            if (quantised && single) {
                multiply_packed_amx(a, a_row, rows, packed, op.format, op.k / kBlock, decoded, tile);
            } else {
                multiply_panel_amx(a + row * a_row, a_row, rows, panel, units, tile, single);
            }
            epilogue<bf16>(op, program.step, tile, row, rows, n0, valid);
        }
    });
    _tile_release();
}
#endif

template <class T>
void gemm(Program& program, const bp_op& op, int thread) {
#if defined(__AMX_BF16__)
    if constexpr (sizeof(T) == 2) return gemm_amx(program, op, thread);
#endif
    constexpr int kPerUnit = 4 / sizeof(T);
    const int64_t k = op.k / kPerUnit, a_row = op.in_stride / kPerUnit;
    const int m = static_cast<int>(num_rows(program, op));
    if (m == 0) return;
    const bool quantised = op.format != BP_PLAIN, single = m <= kMaxRows<T>;
    const int panels = (op.n + BP_PANEL - 1) / BP_PANEL;
    const int most_rows = quantised ? kQuantisedBlockRows : kBlockRows;
    const int blocks = (m + most_rows - 1) / most_rows;
    const int block_rows = (m + blocks - 1) / blocks;
    const int64_t panel_bytes = quantised ? op.k / kBlock * block_bytes(op.format) : op.k * BP_PANEL * sizeof(T);
    const uint32_t* a = static_cast<const uint32_t*>(op.in);
    program.pool->for_units(thread, panels * blocks, [&](int unit) {
        const int first = unit % blocks * block_rows, last = first + block_rows < m ? first + block_rows : m;
        const int n0 = unit / blocks * BP_PANEL, valid = op.n - n0 < BP_PANEL ? op.n - n0 : BP_PANEL;
        const char* packed = static_cast<const char*>(op.weight) + unit / blocks * panel_bytes;
        alignas(64) float tile[kMaxRows<T> * BP_PANEL];
#if defined(__AVX512BF16__)
        if constexpr (sizeof(T) == 2) {
            if (quantised && m <= kFusedRows) {
                const auto multiply = op.format == BP_Q4 ? multiply_block_rows<BP_Q4> : multiply_block_rows<BP_Q8>;
                multiply(m, a, a_row, packed, op.k / kBlock, tile);
                epilogue<T>(op, program.step, tile, 0, m, n0, valid);
                return;
            }
        }
#endif
        if (quantised && single) {
            // A piece at a time, so that what is decoded is still in L1 when it is multiplied.
            T* decoded = reinterpret_cast<T*>(program.scratch[thread]);
            const int64_t count = op.k / kBlock, piece = kDecodedBlocks;
            for (int64_t b = 0; b < count; b += piece) {
                const int64_t some = count - b < piece ? count - b : piece;
                decode_panel(packed + b * block_bytes(op.format), op.format, some, decoded);
                multiply_panel<T>(a + b * kBlock / kPerUnit, a_row, reinterpret_cast<const uint32_t*>(decoded),
                                  some * kBlock / kPerUnit, tile, m, b > 0, false);
            }
            epilogue<T>(op, program.step, tile, 0, m, n0, valid);
            return;
        }
        const uint32_t* panel = reinterpret_cast<const uint32_t*>(packed);
        if (quantised) {
            decode_panel(packed, op.format, op.k / kBlock, reinterpret_cast<T*>(program.scratch[thread]));
            panel = reinterpret_cast<const uint32_t*>(program.scratch[thread]);
        }
        for (int row = first; row < last;) {
            const int rows = next_rows<T>(last - row);
            multiply_panel<T>(a + row * a_row, a_row, panel, k, tile, rows, false, single);
            epilogue<T>(op, program.step, tile, row, rows, n0, valid);
            row += rows;
        }
    });
}

}  // namespace
}  // namespace BP_NS
