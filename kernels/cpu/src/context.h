// What a thread of a step knows, shared by the op kernels of every instruction set. Plain data.
#pragma once

#include "abi.h"
#include "draw_scratch.h"
#include "pool.h"

namespace biphase {

// A piece of attention work: query rows [first, first + count) of one sequence, for one KV head. A row is a (token,
// head of the group) pair, tokens outermost.
struct AttentionUnit {
    int32_t sequence, kv_head, first, count;
    int64_t cost;
};

struct Program {
    bp_model model;
    bp_op* ops;
    int32_t num_ops;
    Pool* pool;
    bp_step step;
    AttentionUnit* units;
    int32_t num_units;
    // Where each thread's share of the units ends.
    int32_t ends[kMaxThreads];
    // Per thread, for attention tiles and decoded weights.
    char* scratch[kMaxThreads];
};

// The kernels of one instruction set and dtype. Each runs its share of the op on the calling thread.
struct Kernels {
    using Run = void (*)(Program& program, const bp_op& op, int thread);
    Run embed, norm, norm_add, gemm, rope_store, attention;
    Run quantise, norm_dot8, gemm_dot8, embed_dot8;
    // Query rows in an attention unit, and bytes of scratch that a thread needs.
    int32_t attention_rows;
    size_t (*attention_scratch_bytes)(const bp_model& model);
    // The token drawn from one row of `n` logits; no op of a tape.
    int64_t (*draw)(const float* logits, int64_t n, const bp_draw& draw, DrawScratch& scratch);
};

const Kernels* generic_kernels(int32_t dtype);
const Kernels* avx2_kernels(int32_t dtype);
const Kernels* avx512_kernels(int32_t dtype);
const Kernels* avx512_bf16_kernels(int32_t dtype);
const Kernels* amx_kernels(int32_t dtype);

inline int64_t num_rows(const Program& program, const bp_op& op) {
    return op.rows == BP_LOGITS_ROWS ? program.step.num_logits : program.step.num_tokens;
}

}  // namespace biphase
