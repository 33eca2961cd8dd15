#define BP_NS biphase_generic
#include "isa.h"

namespace biphase {
const Kernels* generic_kernels(int32_t dtype) { return BP_NS::kernels_of(dtype); }
}  // namespace biphase
