#define BP_NS biphase_avx512_bf16
#include "isa.h"

namespace biphase {
const Kernels* avx512_bf16_kernels(int32_t dtype) { return BP_NS::kernels_of(dtype); }
}  // namespace biphase
