#define BP_NS biphase_amx
#include "isa.h"

namespace biphase {
const Kernels* amx_kernels(int32_t dtype) { return BP_NS::kernels_of(dtype); }
}  // namespace biphase
