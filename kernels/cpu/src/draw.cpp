// Draws tokens from rows of logits, one after the other on the calling thread. How a row is drawn from is in draw.h.
#include "context.h"
#include "draw_scratch.h"

using namespace biphase;

namespace {

const Kernels* kernels_for(int32_t isa) {
#if defined(__x86_64__)
    if (isa >= BP_AVX512) return avx512_kernels(BP_F32);
    if (isa >= BP_AVX2) return avx2_kernels(BP_F32);
#endif
    return generic_kernels(BP_F32);
}

}  // namespace

extern "C" void bp_draw_tokens(const float* logits, int64_t num_rows, int64_t vocab_size, int64_t stride,
                               const bp_draw* draws, int32_t isa, int64_t* tokens) {
    thread_local DrawScratch scratch;
    scratch.reserve(vocab_size);
    const Kernels* kernels = kernels_for(isa);
    for (int64_t i = 0; i < num_rows; ++i) {
        tokens[i] = kernels->draw(logits + i * stride, vocab_size, draws[i], scratch);
    }
}
