// Rows of the KV cache in fp8: float8 e4m3 codes with one power of two for each row. What they mean is defined in
// kernels/reference_fp8.py.
#pragma once

#include "context.h"
#include "simd.h"

namespace BP_NS {
namespace {

using namespace biphase;

// Biased by 127, as in a float, so that a byte in a float's exponent is the scale.
constexpr int kLeastExponent = 27, kMostExponent = 134, kNanExponent = 255;

typedef int8_t vb __attribute__((vector_size(VL), aligned(VL)));

// Where the codes and the exponents of one head's K (part 0) or V (part 1) of a block begin.
struct Fp8Run {
    uint8_t* codes;
    uint8_t* exponents;

    Fp8Run(const bp_model& m, int64_t block, int layer, int part, int head) {
        const int64_t bytes = static_cast<int64_t>(m.block_size) * (m.head_dim + 1);
        codes = static_cast<uint8_t*>(m.kv_cache) +
                (((block * m.num_layers + layer) * 2 + part) * m.num_kv_heads + head) * bytes;
        exponents = codes + static_cast<int64_t>(m.block_size) * m.head_dim;
    }
};

inline float float_of_bits(uint32_t bits) {
    float f;
    std::memcpy(&f, &bits, 4);
    return f;
}

// What codes, moved into a float's places, must be multiplied by: 2^(exponent - 127) and e4m3's other bias.
inline float fp8_factor(uint8_t exponent) {
    return exponent == kNanExponent ? NAN : float_of_bits(static_cast<uint32_t>(exponent + 120) << 23);
}

// Codes -> floats. Subnormal codes become subnormal floats and are multiplied back exactly; with the row's largest
// value near e4m3's largest there are next to none.
inline vf fp8_values(const uint8_t* codes, vf factor) {
    vu wide = __builtin_convertvector(load_as<vb>(codes), vu) << 20;
    return as_vf(wide & setu(static_cast<int32_t>(0x87f00000u))) * factor;
}

inline float fp8_value(uint8_t code, float factor) {
    return float_of_bits((code & 0x80u) << 24 | (code & 0x7fu) << 20) * factor;
}

// What was a code is exact in bfloat16: cut, not rounded.
inline void store_exact(float* p, vf x) { storef(p, x); }
inline void store_exact(bf16* p, vf x) {
    vh h = __builtin_convertvector(as_vu(x) >> 16, vh);
    std::memcpy(p, &h, sizeof h);
}

template <class T>
inline void decode_row(const uint8_t* codes, float factor, int d, T* out) {
    int i = 0;
    const vf factors = setf(factor);
#if defined(__AVX512BF16__)
    if constexpr (sizeof(T) == 2) {
        for (; i + 32 <= d; i += 32) {
            __m512bh both = _mm512_cvtne2ps_pbh((__m512)fp8_values(codes + i + 16, factors),
                                                (__m512)fp8_values(codes + i, factors));
            std::memcpy(out + i, &both, 64);
        }
    }
#endif
    for (; i + VL <= d; i += VL) store_exact(out + i, fp8_values(codes + i, factors));
    for (; i < d; ++i) out[i] = from_float<T>(fp8_value(codes[i], factor));
}

// Magnitudes of up to 448 to codes, to nearest, ties to even.
inline uint32_t fp8_code(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    const uint32_t sign = bits >> 24 & 0x80u;
    bits &= 0x7fffffffu;
    if (bits < 0x3c800000u) {  // 2^-6: below, codes are whole multiples of 2^-9
        const float magic = 12582912.0f;
        return sign | static_cast<uint32_t>((float_of_bits(bits) * 512.0f + magic) - magic);
    }
    return sign | ((bits + 0x7ffffu + (bits >> 20 & 1u)) >> 20) - (120u << 3);
}

// A row of floats into its codes and its exponent.
inline void encode_row(const float* x, int d, uint8_t* codes, uint8_t* exponent) {
    float largest = 0.0f;
    bool finite = true;
    for (int i = 0; i < d; ++i) {
        const float size = std::fabs(x[i]);
        finite &= size <= 3.4028235e38f;
        largest = size > largest ? size : largest;
    }
    uint32_t bits;
    std::memcpy(&bits, &largest, 4);
    // The least exponent that keeps the largest within 1.75 * 2^8: past a mantissa of 1.75 the sum carries.
    int e = static_cast<int>((bits + 0x1fffffu) >> 23) - 8;
    e = e < kLeastExponent ? kLeastExponent : e > kMostExponent ? kMostExponent : e;
    const float step = float_of_bits(static_cast<uint32_t>(254 - e) << 23);
    for (int i = 0; i < d; ++i) {
        float scaled = x[i] * step;
        scaled = scaled > 448.0f ? 448.0f : scaled < -448.0f ? -448.0f : scaled;
        codes[i] = static_cast<uint8_t>(fp8_code(scaled));
    }
    *exponent = static_cast<uint8_t>(finite ? e : kNanExponent);
}

}  // namespace
}  // namespace BP_NS
