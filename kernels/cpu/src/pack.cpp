// Weights into the panels that the GEMM reads. Runs once at load; correctness before speed.
#include <cstring>

#include "abi.h"

namespace {

float half_to_float(uint16_t h) {
    uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16, exponent = (h >> 10) & 0x1fu, mantissa = h & 0x3ffu;
    uint32_t bits;
    if (exponent == 31) {
        bits = sign | 0x7f800000u | (mantissa << 13);
    } else if (exponent != 0) {
        bits = sign | ((exponent + 112) << 23) | (mantissa << 13);
    } else {
        float value = static_cast<float>(mantissa) * 5.9604644775390625e-8f;
        std::memcpy(&bits, &value, 4);
        bits |= sign;
    }
    float f;
    std::memcpy(&f, &bits, 4);
    return f;
}

uint32_t bits_of(const void* src, int32_t dtype, int64_t i) {
    uint32_t bits;
    if (dtype == BP_F32) {
        std::memcpy(&bits, static_cast<const float*>(src) + i, 4);
    } else if (dtype == BP_BF16) {
        bits = static_cast<uint32_t>(static_cast<const uint16_t*>(src)[i]) << 16;
    } else {
        float f = half_to_float(static_cast<const uint16_t*>(src)[i]);
        std::memcpy(&bits, &f, 4);
    }
    return bits;
}

uint16_t to_bf16(uint32_t bits) {
    if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x40u);
    return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

}  // namespace

extern "C" void bp_pack(const void* src, int32_t src_dtype, int64_t n, int64_t k, int64_t src_stride, void* dst,
                        int32_t dst_dtype, int64_t first_column, int64_t run, int64_t step) {
    const int64_t per_unit = dst_dtype == BP_F32 ? 1 : 2;
    const int64_t units = k / per_unit;
    uint32_t* out = static_cast<uint32_t*>(dst);
    for (int64_t row = 0; row < n; ++row) {
        const int64_t column = first_column + row / run * step + row % run;
        uint32_t* to = out + column / BP_PANEL * units * BP_PANEL + column % BP_PANEL;
        const int64_t from = row * src_stride;
        for (int64_t u = 0; u < units; ++u, to += BP_PANEL) {
            if (per_unit == 1) {
                *to = bits_of(src, src_dtype, from + u);
            } else {
                *to = to_bf16(bits_of(src, src_dtype, from + 2 * u)) |
                      static_cast<uint32_t>(to_bf16(bits_of(src, src_dtype, from + 2 * u + 1))) << 16;
            }
        }
    }
}
