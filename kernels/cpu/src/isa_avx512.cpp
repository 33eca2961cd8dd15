#define BP_NS biphase_avx512
#include "isa.h"

namespace biphase {
const Kernels* avx512_kernels(int32_t dtype) { return BP_NS::kernels_of(dtype); }
}  // namespace biphase
