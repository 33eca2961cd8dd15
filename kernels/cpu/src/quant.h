// Weights that stay packed: panels of GGUF's blocks of 32, decoded just before they are multiplied.
//
// A panel's 32 columns and 32 steps of k are one block:
//     BP_Q4   [32] half d, [32] half m, [8][16] words of 8 nibbles     w = d * q + m, q in 0..15
//     BP_Q8   [32] half d, [16][32][2] int8                            w = d * q
// Values run as units of bfloat16 do, [k / 2][column][k % 2]; 16 of them, "a strip", lie in the 16 lanes of a row of
// bytes, or in one nibble of the 16 words: nibble j of word row w is strip 8 * w + j. A decoded weight has the bits of a
// float32 dequantisation rounded to T, so results are those of unpacked weights.
#pragma once

#include "abi.h"
#include "simd.h"

namespace BP_NS {
namespace {

constexpr int kBlock = 32;
// Strips in a block: 4 of them are one k pair of the panel.
constexpr int kStrips = 64;
constexpr int kQuantisedPrefetchBytes = 4096;
constexpr int64_t kQ4Bytes = 640, kQ8Bytes = 1088;

constexpr int64_t block_bytes(int format) { return format == BP_Q4 ? kQ4Bytes : kQ8Bytes; }

inline float half_to_float(uint16_t h) {
#if defined(__F16C__)
    return _cvtsh_ss(h);
#else
    uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16, exponent = (h >> 10) & 0x1fu, mantissa = h & 0x3ffu, bits;
    if (exponent == 0) {
        float value = static_cast<float>(mantissa) * 5.9604644775390625e-8f;
        return sign ? -value : value;
    }
    bits = sign | ((exponent == 31 ? 255u : exponent + 112u) << 23) | (mantissa << 13);
    float f;
    std::memcpy(&f, &bits, 4);
    return f;
#endif
}

// 32 halves as floats, each twice: what the strips of a k pair are scaled by.
inline void spread_halves(const uint16_t* halves, float* out) {
#if defined(__AVX512F__)
    const __m512i low = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
    const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
    for (int i = 0; i < 2; ++i) {
        __m512 x = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(halves) + i));
        _mm512_storeu_ps(out + 32 * i, _mm512_permutexvar_ps(low, x));
        _mm512_storeu_ps(out + 32 * i + 16, _mm512_permutexvar_ps(high, x));
    }
#else
    for (int i = 0; i < 32; ++i) out[2 * i] = out[2 * i + 1] = half_to_float(halves[i]);
#endif
}

// VL values of a strip, from lane `lane` on, before scaling.
template <int kFormat>
inline vf strip_values(const char* block, int strip, int lane) {
    if constexpr (kFormat == BP_Q4) {
        const vu words = loadu(reinterpret_cast<const uint32_t*>(block + 128) + strip / 8 * 16 + lane);
        const vu nibbles = words >> (4 * (strip % 8));
#if defined(__AVX512F__)
        const __m512 digits = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        return (vf)_mm512_permutexvar_ps((__m512i)nibbles, digits);
#else
        return __builtin_convertvector(nibbles & 15, vf);
#endif
    } else {
        typedef int8_t vb __attribute__((vector_size(VL)));
        const int8_t* bytes = reinterpret_cast<const int8_t*>(block + 64) + strip * 16 + lane;
#if defined(__AVX512F__)
        return (vf)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes))));
#else
        return __builtin_convertvector(load_as<vb>(bytes), vf);
#endif
    }
}

// d * q is exact in a float32: fused or not gives the same.
template <int kFormat>
inline vf scaled(vf q, const float* d, const float* m) {
    if constexpr (kFormat == BP_Q4) return fma(q, loadf(d), loadf(m));
    return q * loadf(d);
}

template <class T, int kFormat>
inline void decode_blocks(const char* block, int64_t count, T* out) {
    alignas(64) float d[64], m[64];
    for (int64_t b = 0; b < count; ++b, block += block_bytes(kFormat), out += kBlock * BP_PANEL) {
        spread_halves(reinterpret_cast<const uint16_t*>(block), d);
        if (kFormat == BP_Q4) spread_halves(reinterpret_cast<const uint16_t*>(block) + 32, m);
        for (int group = 0; group < kStrips; group += 8) {
#if defined(__AVX512BF16__)
            if constexpr (sizeof(T) == 2) {
#pragma GCC unroll 4
                for (int j = 0; j < 8; j += 2) {
                    const int strip = group + j, at = j % 4 * 16;
                    const vf low = scaled<kFormat>(strip_values<kFormat>(block, strip, 0), d + at, m + at);
                    const vf high = scaled<kFormat>(strip_values<kFormat>(block, strip + 1, 0), d + at + 16, m + at + 16);
                    const __m512bh both = _mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
                    std::memcpy(out + strip * 16, &both, sizeof both);
                }
                continue;
            }
#endif
#pragma GCC unroll 8
            for (int j = 0; j < 8; ++j) {
                const int strip = group + j, at = j % 4 * 16;
                alignas(64) float values[16];
                for (int lane = 0; lane < 16; lane += VL) {
                    const vf w =
                        scaled<kFormat>(strip_values<kFormat>(block, strip, lane), d + at + lane, m + at + lane);
                    if constexpr (sizeof(T) == 2) {
                        store_act(out + strip * 16 + lane, w);
                    } else {
                        storef(values + lane, w);
                    }
                }
                if constexpr (sizeof(T) == 4) {
                    T* rows = out + strip / 4 * 2 * BP_PANEL + j % 4 * 8;
                    for (int i = 0; i < 8; ++i) {
                        rows[i] = values[2 * i];
                        rows[BP_PANEL + i] = values[2 * i + 1];
                    }
                }
            }
        }
    }
}

// Decodes `count` blocks of one panel into a plain panel of T at out.
template <class T>
inline void decode_panel(const char* block, int format, int64_t count, T* out) {
    if (format == BP_Q4) {
        decode_blocks<T, BP_Q4>(block, count, out);
    } else {
        decode_blocks<T, BP_Q8>(block, count, out);
    }
}

#if defined(__AVX512BF16__)
// Rows that are multiplied by weights while these are decoded, in registers.
constexpr int kFusedRows = 8;

// tile[rows][32] = A * panel, the same chains of sums as in micro.h. a: bfloat16 pairs.
template <int kFormat, int MR>
inline void multiply_blocks(const uint32_t* a, int64_t a_row, const char* block, int64_t count, float* tile) {
    __m512 acc[MR][2];
#pragma GCC unroll 8
    for (int r = 0; r < MR; ++r) acc[r][0] = acc[r][1] = _mm512_setzero_ps();
    alignas(64) float d[64], m[64];
    for (int64_t b = 0; b < count; ++b, block += block_bytes(kFormat), a += kBlock / 2) {
        spread_halves(reinterpret_cast<const uint16_t*>(block), d);
        if (kFormat == BP_Q4) spread_halves(reinterpret_cast<const uint16_t*>(block) + 32, m);
        for (int group = 0; group < kStrips; group += 8) {
            if (kFormat == BP_Q4) {
                __builtin_prefetch(block + kQuantisedPrefetchBytes + 80 * (group / 8), 0, 3);
            } else {
                __builtin_prefetch(block + kQuantisedPrefetchBytes + 136 * (group / 8), 0, 3);
                __builtin_prefetch(block + kQuantisedPrefetchBytes + 136 * (group / 8) + 64, 0, 3);
            }
#pragma GCC unroll 2
            for (int half = 0; half < 2; ++half) {
                vf w[4];
#pragma GCC unroll 4
                for (int i = 0; i < 4; ++i) {
                    const vf q = strip_values<kFormat>(block, group + 4 * half + i, 0);
                    w[i] = scaled<kFormat>(q, d + 16 * i, m + 16 * i);
                }
                const __m512bh left = _mm512_cvtne2ps_pbh((__m512)w[1], (__m512)w[0]);
                const __m512bh right = _mm512_cvtne2ps_pbh((__m512)w[3], (__m512)w[2]);
#pragma GCC unroll 8
                for (int r = 0; r < MR; ++r) {
                    const __m512bh x =
                        (__m512bh)_mm512_set1_epi32(static_cast<int>(a[r * a_row + group / 4 + half]));
                    acc[r][0] = _mm512_dpbf16_ps(acc[r][0], x, left);
                    acc[r][1] = _mm512_dpbf16_ps(acc[r][1], x, right);
                }
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < MR; ++r) {
        _mm512_store_ps(tile + r * BP_PANEL, acc[r][0]);
        _mm512_store_ps(tile + r * BP_PANEL + 16, acc[r][1]);
    }
}

template <int kFormat>
inline void multiply_block_rows(int rows, const uint32_t* a, int64_t a_row, const char* block, int64_t count,
                                float* tile) {
    switch (rows) {
        case 1: return multiply_blocks<kFormat, 1>(a, a_row, block, count, tile);
        case 2: return multiply_blocks<kFormat, 2>(a, a_row, block, count, tile);
        case 3: return multiply_blocks<kFormat, 3>(a, a_row, block, count, tile);
        case 4: return multiply_blocks<kFormat, 4>(a, a_row, block, count, tile);
        case 5: return multiply_blocks<kFormat, 5>(a, a_row, block, count, tile);
        case 6: return multiply_blocks<kFormat, 6>(a, a_row, block, count, tile);
        case 7: return multiply_blocks<kFormat, 7>(a, a_row, block, count, tile);
        case 8: return multiply_blocks<kFormat, 8>(a, a_row, block, count, tile);
    }
}
#endif

// One weight, for embedding rows.
inline float decode_one(const char* block, int format, int column, int k) {
    const uint16_t* halves = reinterpret_cast<const uint16_t*>(block);
    const float d = half_to_float(halves[column]);
    const int strip = k / 2 * 4 + column / 8, lane = column % 8 * 2 + k % 2;
    if (format == BP_Q8) return d * static_cast<float>(reinterpret_cast<const int8_t*>(block + 64)[strip * 16 + lane]);
    const uint32_t word = reinterpret_cast<const uint32_t*>(block + 128)[strip / 8 * 16 + lane];
    return d * static_cast<float>(word >> (4 * (strip % 8)) & 15u) + half_to_float(halves[32 + column]);
}

}  // namespace
}  // namespace BP_NS
