// Ends a translation unit of one instruction set: the tables of its kernels. Include after defining BP_NS.
#pragma once

#include "attention.h"
#include "dot8.h"
#include "draw.h"
#include "gemm.h"
#include "rows.h"

namespace BP_NS {
namespace {

template <class T>
constexpr biphase::Kernels kKernels = {
    embed<T>, norm<T>, norm_add, gemm<T>, rope_store<T>, attention<T>,
    quantise<T>, norm_dot8, gemm_dot8<T>, embed_dot8, kTiles * kLanes, attention_scratch_bytes<T>,
    draw_row,
};

inline const biphase::Kernels* kernels_of(int32_t dtype) {
    if (dtype == BP_F32) return &kKernels<float>;
    if (dtype == BP_BF16) return &kKernels<bf16>;
    return nullptr;
}

}  // namespace
}  // namespace BP_NS
