#define BP_NS biphase_avx2
#include "isa.h"

namespace biphase {
const Kernels* avx2_kernels(int32_t dtype) { return BP_NS::kernels_of(dtype); }
}  // namespace biphase
