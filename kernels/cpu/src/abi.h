// The C interface between Python (kernels/cpu/library.py mirrors it with ctypes) and the compiled forward program.
//
// A program is a tape of ops over buffers that the caller owns. One call runs the tape over one ragged batch.
// "Unit": 32 bits of a matrix row, one float or one pair of bfloat16. Every dot product here runs over units.
#pragma once

#include <cstddef>
#include <cstdint>

#define BP_ABI_VERSION 5
// Columns of one weight panel: weights lie as [ceil(n / 32)][k in units][32 columns] units, zero-padded in n.
#define BP_PANEL 32

extern "C" {

enum bp_dtype : int32_t { BP_F32 = 0, BP_BF16 = 1, BP_F16 = 2, BP_FP8 = 3 };

// How a packed weight lies in its panels: as numbers of the program's dtype, or as GGUF blocks of 32 (see quant.h).
enum bp_format : int32_t { BP_PLAIN = 0, BP_Q8 = 1, BP_Q4 = 2 };

// Weights that are multiplied as small integers with quantised rows (see dot8.h).
enum bp_dot8 : int32_t { BP_DOT_Q4 = 1, BP_DOT_Q8 = 2, BP_DOT_INT8 = 3 };

enum bp_isa : int32_t { BP_GENERIC = 0, BP_AVX2 = 1, BP_AVX512 = 2, BP_AVX512_BF16 = 3, BP_AMX = 4 };

enum bp_kind : int32_t {
    BP_EMBED = 0,       // out f32[tokens, n] = scale * row token_id of weight (packed panels, or plain rows)
    BP_NORM = 1,        // out act[rows, n] = RMSNorm(in f32) * weight f32
    BP_NORM_ADD = 2,    // out f32[rows, n] += RMSNorm(in f32) * weight f32
    BP_GEMM = 3,        // epilogue(in act[rows, k] * weight^T)
    BP_ROPE_STORE = 4,  // in f32 [tokens, q|k|v] -> q act[tokens, heads * head_dim] (out), K and V into the cache
    BP_ATTENTION = 5,   // in act q -> out act[tokens, heads * head_dim]
    // Over rows of small integers (see dot8.h); their strides are in bytes.
    BP_QUANTISE = 6,    // out quantised[rows, n] = in act[rows, n]
    BP_NORM_DOT8 = 7,   // as BP_NORM, out quantised
    BP_GEMM_DOT8 = 8,   // as BP_GEMM, in quantised
    BP_EMBED_DOT8 = 9,  // as BP_EMBED, out of panels of integers
};

enum bp_epilogue : int32_t {
    BP_STORE_F32 = 0,   // out f32 = y + bias
    BP_ADD_F32 = 1,     // out f32 += y + bias
    BP_GATED = 2,       // out act[:, n / 2] = activation(gate) * up; each panel holds 16 gate, then 16 up columns
    BP_LOGITS = 3,      // the step's logits = softcap(y)
};

enum bp_activation : int32_t { BP_SILU = 0, BP_GELU_TANH = 1 };

enum bp_rows : int32_t { BP_ALL_TOKENS = 0, BP_LOGITS_ROWS = 1 };

struct bp_op {
    int32_t kind;
    int32_t epilogue;
    int32_t activation;
    // Rows the op runs over. A BP_NORM over logits rows gathers them from `in`.
    int32_t rows;
    int32_t layer;
    // Attention: keys a token sees, itself included; 0 = all before it.
    int32_t window;
    int32_t n, k;
    // In elements.
    int32_t in_stride, out_stride;
    // BP_EMBED: 1 if `weight` is packed panels.
    int32_t packed;
    // bp_dot8 of `weight`.
    int32_t dot8;
    // Of packed panels.
    int32_t format;
    float eps, scale, softcap;
    const void* weight;
    const float* bias;
    const void* in;
    void* out;
    const float* q_norm;
    const float* k_norm;
    // [positions][2][rotary_dim / 2]: cosines, then sines.
    const float* rope;
};

struct bp_model {
    int32_t dtype;
    int32_t num_heads, num_kv_heads, head_dim, rotary_dim;
    int32_t num_layers, block_size;
    int32_t max_tokens, max_seqs;
    float norm_eps;
    // [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim] of kv_dtype, which is dtype or BP_FP8; then each
    // head's run is block_size rows of codes and after them block_size exponents (see fp8.h).
    void* kv_cache;
    int32_t kv_dtype;
};

struct bp_step {
    int32_t num_tokens, num_seqs, num_logits, block_table_stride;
    const int32_t* token_ids;
    const int32_t* positions;
    const int64_t* slot_mapping;
    const int32_t* query_start_loc;
    const int32_t* seq_lens;
    const int32_t* block_tables;
    const int32_t* logits_indices;
    float* logits;  // f32 [num_logits, n of the logits op]
};

#define BP_MAX_SUMS 256
#define BP_MIN_SEALED 256

// A run of bytes; lies as struct iovec does.
struct bp_span {
    const void* start;
    int64_t length;
};

// How to draw a token from a row of logits.
struct bp_draw {
    // Above 0.
    double temperature;
    // 1: off.
    double top_p;
    // In [0, 1).
    double uniform;
    float min_p;
    // 0: off.
    int32_t top_k;
};

#pragma GCC visibility push(default)

int32_t bp_abi_version();
// Best bp_isa this machine runs.
int32_t bp_best_isa();
// Zeroed memory on huge pages where the system has them; null when there is none.
void* bp_arena_alloc(size_t bytes);
void bp_arena_free(void* memory, size_t bytes);
// Packs src [n, k] (row stride in elements) into panels of dst_dtype; row i becomes column
// first_column + (i / run) * step + i % run. Columns of dst that nothing packs stay as they are.
void bp_pack(const void* src, int32_t src_dtype, int64_t n, int64_t k, int64_t src_stride, void* dst,
             int32_t dst_dtype, int64_t first_column, int64_t run, int64_t step);
// The same for rows of GGUF blocks ("Q8_0", "Q4_0", "Q4_1") of row_bytes bytes, with dst of the format that
// bp_block_format says. k is a multiple of 32.
void bp_pack_blocks(const void* src, const char* encoding, int64_t n, int64_t k, int64_t row_bytes, void* dst,
                    int64_t first_column, int64_t run, int64_t step);
// The bp_format that blocks of this encoding are packed as; -1 if none.
int32_t bp_block_format(const char* encoding);
// Bytes of 32 steps of k of one panel.
int64_t bp_panel_block_bytes(int32_t dtype, int32_t format);
// Packs rows for BP_GEMM_DOT8: GGUF's Q4_0, Q4_1 (has_min) or Q8_0 blocks, row_bytes a row, or int8 [n, k] and scales
// [n] (BP_DOT_INT8). Columns are as in bp_pack; 32 of them take bp_dot8_panel_bytes.
void bp_pack_dot8(const void* src, const float* scales, int32_t dot8, int32_t has_min, int64_t n, int64_t k,
                  int64_t row_bytes, void* dst, int64_t first_column, int64_t run, int64_t step);
int64_t bp_dot8_panel_bytes(int32_t dot8, int64_t k);
// Starts the threads; null when memory or threads cannot be had. The ops and model are copied, what they point at is not.
void* bp_program_create(const bp_model* model, const bp_op* ops, int32_t num_ops, int32_t num_threads, int32_t nice,
                        int32_t isa);
// Runs one step; one at a time. The caller is one of the threads.
void bp_program_run(void* program, const bp_step* step);
// Seconds spent in each op by thread 0 since the last call of this with reset; needs bp_program_profile(program, 1).
void bp_program_profile(void* program, int32_t enable);
void bp_program_times(void* program, double* seconds, int32_t reset);
void bp_program_destroy(void* program);
// XXH3-64 of each run, of more than 240 bytes, and one more of all these sums and the runs' ids, padded with zeros to
// BP_MIN_SEALED bytes. At most BP_MAX_SUMS runs. Any isa that this machine runs gives the same sums.
void bp_sum_blocks(const bp_span* spans, int64_t num_spans, const uint64_t* ids, int32_t isa, uint64_t* sums);
// Draws a token from each row of logits: min_p, top_k and top_p cut what temperature makes of them, and the first token
// is taken whose running sum exceeds uniform times the total. Any isa that this machine runs draws the same. NaN is banned
// as -inf is; of a row without anything else token 0.
void bp_draw_tokens(const float* logits, int64_t num_rows, int64_t vocab_size, int64_t stride, const bp_draw* draws,
                    int32_t isa, int64_t* tokens);

#pragma GCC visibility pop
}
