// Vectors of floats for the instruction set that the including file is compiled for. Everything here has internal
// linkage through BP_NS, one namespace per instruction set, so that the linker never mixes two of them.
//
// VL floats in a vector `vf`; a vector of units `vu` holds as many floats or bfloat16 pairs.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace BP_NS {
namespace {

using bf16 = uint16_t;

#if defined(__AVX512F__)
constexpr int VL = 16;
#elif defined(__AVX2__)
constexpr int VL = 8;
#else
constexpr int VL = 4;
#endif

typedef float vf __attribute__((vector_size(4 * VL), aligned(4 * VL)));
typedef int32_t vu __attribute__((vector_size(4 * VL), aligned(4 * VL)));
typedef uint16_t vh __attribute__((vector_size(2 * VL), aligned(2 * VL)));

template <class V>
inline V load_as(const void* p) {
    V v;
    std::memcpy(&v, p, sizeof v);
    return v;
}
inline vf loadf(const float* p) { return load_as<vf>(p); }
inline vu loadu(const void* p) { return load_as<vu>(p); }
inline void storef(float* p, vf v) { std::memcpy(p, &v, sizeof v); }
inline vf setf(float x) { return x - vf{}; }
inline vu setu(int32_t x) { return x - vu{}; }
inline vf as_vf(vu v) { return (vf)v; }
inline vu as_vu(vf v) { return (vu)v; }

#if defined(__AVX512F__)
inline vf fma(vf a, vf b, vf c) { return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
inline vf vmax(vf a, vf b) { return (vf)_mm512_max_ps((__m512)a, (__m512)b); }
inline vf round_even(vf a) { return (vf)_mm512_roundscale_ps((__m512)a, 8); }
#elif defined(__AVX2__)
inline vf fma(vf a, vf b, vf c) { return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }
inline vf vmax(vf a, vf b) { return (vf)_mm256_max_ps((__m256)a, (__m256)b); }
inline vf round_even(vf a) { return (vf)_mm256_round_ps((__m256)a, 8); }
#else
inline vf fma(vf a, vf b, vf c) { return a * b + c; }
inline vf vmax(vf a, vf b) { return a > b ? a : b; }
// For |a| < 2^22, which is all that exp2 asks for.
inline vf round_even(vf a) {
    vf magic = setf(12582912.0f);
    return (a + magic) - magic;
}
#endif
inline vf vmin(vf a, vf b) { return a < b ? a : b; }

// acc + the dot product of two units. The order of a pair's two products is fixed per instruction set.
template <class T>
inline vf dot(vf acc, vu a, vu b);
template <>
inline vf dot<float>(vf acc, vu a, vu b) {
    return fma(as_vf(a), as_vf(b), acc);
}
template <>
inline vf dot<bf16>(vf acc, vu a, vu b) {
#if defined(__AVX512BF16__)
    return (vf)_mm512_dpbf16_ps((__m512)acc, (__m512bh)a, (__m512bh)b);
#else
    const vu high = setu(static_cast<int32_t>(0xffff0000u));
    acc = fma(as_vf(a & high), as_vf(b & high), acc);
    return fma(as_vf(a << 16), as_vf(b << 16), acc);
#endif
}

inline float to_float(bf16 x) {
    uint32_t bits = static_cast<uint32_t>(x) << 16;
    float f;
    std::memcpy(&f, &bits, 4);
    return f;
}
inline float to_float(float x) { return x; }

// Round to nearest even. NaN stays NaN.
template <class T>
inline T from_float(float x);
template <>
inline float from_float<float>(float x) {
    return x;
}
template <>
inline bf16 from_float<bf16>(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<bf16>((bits >> 16) | 0x40u);
    return static_cast<bf16>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

// The upper halves, rounded, as 32-bit lanes. Not for NaN payloads that carry only low bits.
inline vu bf16_bits(vf x) {
#if defined(__AVX512BF16__)
    return (vu)_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)x));
#else
    vu bits = as_vu(x);
    vu odd = (bits >> 16) & 1;
    return ((bits + 0x7fff + odd) >> 16) & 0xffff;
#endif
}

#if defined(__AVX512BW__)
// Picks (a[0], b[0], a[1], b[1], ...) out of two vectors of 32, or out of the halves of one.
alignas(64) constexpr uint16_t kInterleave[64] = {
    0,  32, 1,  33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39, 8,  40, 9,  41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47,
    16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21, 53, 22, 54, 23, 55, 24, 56, 25, 57, 26, 58, 27, 59, 28, 60, 29, 61, 30, 62, 31, 63};
alignas(64) constexpr uint16_t kInterleaveHalves[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                        8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
#endif

// a and b rounded to bfloat16, pair by pair: a in the low half.
inline vu bf16_pairs(vf a, vf b) {
#if defined(__AVX512BF16__)
    return (vu)_mm512_permutexvar_epi16(_mm512_load_si512(kInterleaveHalves),
                                        (__m512i)_mm512_cvtne2ps_pbh((__m512)b, (__m512)a));
#else
    return bf16_bits(a) | (bf16_bits(b) << 16);
#endif
}

template <class T>
inline void store_act(T* p, vf x);
template <>
inline void store_act<float>(float* p, vf x) {
    storef(p, x);
}
template <>
inline void store_act<bf16>(bf16* p, vf x) {
#if defined(__AVX512BF16__)
    __m256bh h = _mm512_cvtneps_pbh((__m512)x);
    std::memcpy(p, &h, 32);
#else
    vh h = __builtin_convertvector(bf16_bits(x), vh);
    std::memcpy(p, &h, sizeof h);
#endif
}

template <class T>
inline vf load_act(const T* p);
template <>
inline vf load_act<float>(const float* p) {
    return loadf(p);
}
template <>
inline vf load_act<bf16>(const bf16* p) {
    return as_vf(__builtin_convertvector(load_as<vh>(p), vu) << 16);
}

// Sums the lanes as a tree: halves onto halves.
inline float sum_lanes(vf v) {
    float lanes[VL];
    storef(lanes, v);
    for (int width = VL / 2; width > 0; width /= 2) {
        for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
    }
    return lanes[0];
}

inline float max_lanes(vf v) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)v);
#endif
    float lanes[VL];
    storef(lanes, v);
    for (int width = VL / 2; width > 0; width /= 2) {
        for (int i = 0; i < width; ++i) lanes[i] = lanes[i] > lanes[i + width] ? lanes[i] : lanes[i + width];
    }
    return lanes[0];
}

// 2^x for x <= 127, by a polynomial of degree 6 on [-0.5, 0.5], to 2 ulp; of degree 4, to 2^-17. 0 for x <= -150 and for
// -inf.
template <int kDegree>
inline vf exp2_poly(vf x) {
    x = vmax(x, setf(-160.0f));
    vf n = round_even(x);
    vf f = x - n;
    vf p;
    if constexpr (kDegree == 6) {
        p = setf(1.5403530e-4f);
        p = fma(p, f, setf(1.3333558e-3f));
        p = fma(p, f, setf(9.6181291e-3f));
        p = fma(p, f, setf(5.5504109e-2f));
        p = fma(p, f, setf(2.4022651e-1f));
        p = fma(p, f, setf(6.9314718e-1f));
    } else {
        p = setf(9.6181291e-3f);
        p = fma(p, f, setf(5.5504109e-2f));
        p = fma(p, f, setf(2.4022651e-1f));
        p = fma(p, f, setf(6.9314718e-1f));
    }
    p = fma(p, f, setf(1.0f));
#if defined(__AVX512F__)
    return (vf)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
    // In two steps, since 2^n alone may be too small for a float.
    vu whole = __builtin_convertvector(n, vu), half = whole >> 1;
    return p * as_vf((half + 127) << 23) * as_vf((whole - half + 127) << 23);
#endif
}
inline vf exp2_of(vf x) { return exp2_poly<6>(x); }
// For numbers that are rounded to T next.
template <class T>
inline vf exp2_for(vf x) {
    return exp2_poly<sizeof(T) == 4 ? 6 : 4>(x);
}

constexpr float kLog2e = 1.44269504088896341f;

// 1 / (1 + e^-x); x is kept above -87, where it is 0 within a float's smallest normals.
inline vf sigmoid(vf x) {
    vf e = exp2_of(vmin(x * -kLog2e, setf(126.0f)));
    return 1.0f / (1.0f + e);
}

inline vf tanh_of(vf x) {
    // tanh x = 2 sigmoid(2x) - 1; near zero, where that cancels, an odd polynomial.
    vf y = 2.0f * sigmoid(2.0f * x) - 1.0f;
    vf x2 = x * x;
    vf p = fma(x2, setf(-17.0f / 315.0f), setf(2.0f / 15.0f));
    p = fma(p, x2, setf(-1.0f / 3.0f));
    vf small = fma(p * x2, x, x);
    return x2 < 0.01f ? small : y;
}

inline vf silu(vf x) { return x * sigmoid(x); }

inline vf gelu_tanh(vf x) {
    vf inner = 0.7978845608028654f * fma(0.044715f * x * x, x, x);
    return 0.5f * x * (1.0f + tanh_of(inner));
}

}  // namespace
}  // namespace BP_NS
