// Rows of GGUF blocks, or of int8 with one scale a row, into the panels of dot8.h. Runs once at load; correctness before
// speed.
#include <cstring>

#include "abi.h"

namespace {

uint16_t float_to_half(float f) {
    uint32_t bits;
    std::memcpy(&bits, &f, 4);
    const uint32_t sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
    if (magnitude >= 0x47800000u) return static_cast<uint16_t>(sign | 0x7c00u);
    if (magnitude >= 0x38800000u) return static_cast<uint16_t>(sign | (magnitude - 0x38000000u) >> 13);
    float value;
    std::memcpy(&value, &magnitude, 4);
    return static_cast<uint16_t>(sign | static_cast<uint32_t>(value * 16777216.0f));
}

float half_to_float(uint16_t h) {
    const uint32_t exponent = (h >> 10) & 0x1fu, mantissa = h & 0x3ffu;
    float f = static_cast<float>(mantissa) * 5.9604644775390625e-8f;
    if (exponent) {
        const uint32_t bits = ((exponent == 31 ? 255u : exponent + 112u) << 23) | (mantissa << 13);
        std::memcpy(&f, &bits, 4);
    }
    return h & 0x8000u ? -f : f;
}

}  // namespace

extern "C" int64_t bp_dot8_panel_bytes(int32_t format, int64_t k) {
    const int64_t groups = (k + 31) / 32;
    switch (format) {
        case BP_DOT_Q4: return groups * 640;
        case BP_DOT_Q8: return groups * 1088;
        case BP_DOT_INT8: return groups * 1024 + 128;
    }
    return 0;
}

extern "C" void bp_pack_dot8(const void* src, const float* scales, int32_t format, int32_t has_min, int64_t n, int64_t k,
                             int64_t row_bytes, void* dst, int64_t first_column, int64_t run, int64_t step) {
    const int64_t groups = (k + 31) / 32, panel_bytes = bp_dot8_panel_bytes(format, k);
    for (int64_t row = 0; row < n; ++row) {
        const int64_t column = first_column + row / run * step + row % run, c = column % BP_PANEL;
        const unsigned char* in = static_cast<const unsigned char*>(src) + row * row_bytes;
        unsigned char* panel = static_cast<unsigned char*>(dst) + column / BP_PANEL * panel_bytes;
        if (format == BP_DOT_INT8) {
            for (int64_t i = 0; i < k; ++i) {
                panel[i / 32 * 1024 + i % 32 / 4 * 128 + 4 * c + i % 4] = static_cast<unsigned char>(in[i] + 128);
            }
            std::memcpy(panel + groups * 1024 + 4 * c, scales + row, 4);
            continue;
        }
        for (int64_t g = 0; g < groups; ++g) {
            if (format == BP_DOT_Q8) {
                unsigned char* out = panel + g * 1088;
                std::memcpy(out + 2 * c, in, 2);
                for (int64_t i = 0; i < 32; ++i) {
                    out[64 + i / 4 * 128 + 4 * c + i % 4] = static_cast<unsigned char>(in[2 + i] + 128);
                }
                in += 34;
                continue;
            }
            unsigned char* out = panel + g * 640;
            uint16_t d, m;
            std::memcpy(&d, in, 2);
            // Without a minimum of its own a block is d * (u - 8); a half holds -8 d exactly.
            m = float_to_half(-8.0f * half_to_float(d));
            if (has_min) std::memcpy(&m, in + 2, 2);
            std::memcpy(out + 2 * c, &d, 2);
            std::memcpy(out + 64 + 2 * c, &m, 2);
            in += has_min ? 4 : 2;
            // The file's bytes pair steps k and k + 16 as well.
            for (int64_t i = 0; i < 16; ++i) out[128 + i / 4 * 128 + 4 * c + i % 4] = in[i];
            in += 16;
        }
    }
}
