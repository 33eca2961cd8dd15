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

// Of numbers that a half holds exactly; larger ones become infinite.
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

extern "C" int32_t bp_block_format(const char* encoding) {
    if (std::strcmp(encoding, "Q8_0") == 0) return BP_Q8;
    if (std::strcmp(encoding, "Q4_0") == 0 || std::strcmp(encoding, "Q4_1") == 0) return BP_Q4;
    return -1;
}

extern "C" int64_t bp_panel_block_bytes(int32_t dtype, int32_t format) {
    if (format == BP_PLAIN) return 32 * BP_PANEL * (dtype == BP_F32 ? 4 : 2);
    return format == BP_Q4 ? 640 : 1088;
}

extern "C" void bp_pack_blocks(const void* src, const char* encoding, int64_t n, int64_t k, int64_t row_bytes, void* dst,
                               int64_t first_column, int64_t run, int64_t step) {
    const bool is_q8 = bp_block_format(encoding) == BP_Q8, has_m = std::strcmp(encoding, "Q4_1") == 0;
    const int64_t blocks = k / 32, out_bytes = bp_panel_block_bytes(BP_BF16, is_q8 ? BP_Q8 : BP_Q4);
    const int64_t in_bytes = is_q8 ? 34 : has_m ? 20 : 18;
    for (int64_t row = 0; row < n; ++row) {
        const int64_t column = first_column + row / run * step + row % run, c = column % BP_PANEL;
        const char* in = static_cast<const char*>(src) + row * row_bytes;
        char* out = static_cast<char*>(dst) + column / BP_PANEL * blocks * out_bytes;
        for (int64_t b = 0; b < blocks; ++b, in += in_bytes, out += out_bytes) {
            std::memcpy(out + 2 * c, in, 2);
            if (is_q8) {
                for (int64_t i = 0; i < 32; ++i) out[64 + (i / 2 * BP_PANEL + c) * 2 + i % 2] = in[2 + i];
                continue;
            }
            uint16_t d, m;
            std::memcpy(&d, in, 2);
            // Q4_0 is d * (q - 8): m is -8 d. A half holds it exactly: three more in the exponent, or shifted bits of a
            // subnormal.
            m = static_cast<uint16_t>(float_to_half(-8.0f * half_to_float(d)));
            if (has_m) std::memcpy(&m, in + 2, 2);
            std::memcpy(out + 64 + 2 * c, &m, 2);
            const unsigned char* nibbles = reinterpret_cast<const unsigned char*>(in + (has_m ? 4 : 2));
            uint32_t* words = reinterpret_cast<uint32_t*>(out + 128);
            for (int64_t i = 0; i < 32; ++i) {
                const uint32_t q = i < 16 ? nibbles[i] & 15u : nibbles[i - 16] >> 4;
                const int64_t strip = i / 2 * 4 + c / 8, lane = c % 8 * 2 + i % 2, shift = 4 * (strip % 8);
                uint32_t& word = words[strip / 8 * 16 + lane];
                word = (word & ~(15u << shift)) | q << shift;
            }
        }
    }
}
