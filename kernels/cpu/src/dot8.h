// Y = A * W^T where both sides are small integers: A quantised to int8 in groups of 32 steps of k, W packed in 4 or 8 bits.
//
// Groups never share an accumulator: the dot product over a group is an exact int32, then scaled and added in float32 in
// ascending order of k. So an element's bits depend on its own row and column alone, and are the same whatever the tile.
//
// A quantised row:  [groups][32] int8 q | [groups] float d | [groups] float d * sum(q) | [groups] int32 sum(q)
//                   stands for d * q.
// A packed panel:   per group of k, for its 32 columns
//     BP_DOT_Q4     [32] half d, [32] half m, [4][32][4] bytes    w = d * u + m; byte i of row r: u of k = 4 r + i in
//                                                                 the low nibble, of k = 16 + 4 r + i in the high one
//     BP_DOT_Q8     [32] half d, [8][32][4] bytes                 w = d * (u - 128); byte i of row r: k = 4 r + i
//     BP_DOT_INT8   [8][32][4] bytes, and after all groups [32] float d                    w = d * (u - 128)
#pragma once

#include "context.h"
#include "gemm.h"
#include "rows.h"
#include "simd.h"

namespace BP_NS {
namespace {

using namespace biphase;

constexpr int kGroup = 32;
constexpr int kUnits = kGroup / 4;

template <int kFormat>
struct Dot8 {
    static constexpr bool kNibbles = kFormat == BP_DOT_Q4;
    static constexpr bool kHasScale = kFormat != BP_DOT_INT8;
    static constexpr int64_t kHeader = kFormat == BP_DOT_Q4 ? 128 : kFormat == BP_DOT_Q8 ? 64 : 0;
    static constexpr int64_t kGroupBytes = kHeader + (kNibbles ? 512 : 1024);
    static constexpr int64_t kTailBytes = kHasScale ? 0 : 128;
};

struct QuantisedRow {
    const int8_t* q;
    const float* d;
    const float* sums;
    const int32_t* counts;
};

inline QuantisedRow quantised_row(const char* row, int groups) {
    const float* d = reinterpret_cast<const float*>(row + groups * kGroup);
    return {reinterpret_cast<const int8_t*>(row), d, d + groups, reinterpret_cast<const int32_t*>(d + 2 * groups)};
}

// Rows of a tile: integer and float sums of all of them stay in registers.
#if defined(__AVX512F__)
constexpr int kDotRows = 5;
#elif defined(__AVX2__)
constexpr int kDotRows = 2;
#else
constexpr int kDotRows = 1;
#endif

inline vf half_vector(const uint16_t* halves) {
#if defined(__AVX512F__)
    return (vf)_mm512_cvtph_ps(load_as<__m256i>(halves));
#elif defined(__F16C__)
    return (vf)_mm256_cvtph_ps(load_as<__m128i>(halves));
#else
    vf out;
    for (int i = 0; i < VL; ++i) {
        uint32_t h = halves[i], sign = (h & 0x8000u) << 16, exponent = (h >> 10) & 0x1fu, mantissa = h & 0x3ffu, bits;
        float f = static_cast<float>(mantissa) * 5.9604644775390625e-8f;
        if (exponent) {
            bits = ((exponent == 31 ? 255u : exponent + 112u) << 23) | (mantissa << 13);
            std::memcpy(&f, &bits, 4);
        }
        out[i] = sign ? -f : f;
    }
    return out;
#endif
}

inline float half_value(uint16_t half) {
    uint16_t all[VL] = {half};
    return half_vector(all)[0];
}

// acc + the four products of each lane's unsigned bytes in w with the signed bytes of a, exact. kSmall: w below 16.
template <bool kSmall>
inline vu dot_bytes(vu acc, vu w, int32_t a) {
#if defined(__AVX512VNNI__)
    return (vu)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)w, _mm512_set1_epi32(a));
#elif defined(__AVX512BW__)
    const __m512i av = _mm512_set1_epi32(a), wv = (__m512i)w;
    if constexpr (kSmall) {
        return acc + (vu)_mm512_madd_epi16(_mm512_maddubs_epi16(wv, av), _mm512_set1_epi16(1));
    } else {
        const __m512i even = _mm512_madd_epi16(_mm512_and_si512(wv, _mm512_set1_epi16(255)),
                                               _mm512_srai_epi16(_mm512_slli_epi16(av, 8), 8));
        return acc + (vu)even + (vu)_mm512_madd_epi16(_mm512_srli_epi16(wv, 8), _mm512_srai_epi16(av, 8));
    }
#elif defined(__AVX2__)
    const __m256i av = _mm256_set1_epi32(a), wv = (__m256i)w;
    if constexpr (kSmall) {
        return acc + (vu)_mm256_madd_epi16(_mm256_maddubs_epi16(wv, av), _mm256_set1_epi16(1));
    } else {
        const __m256i even = _mm256_madd_epi16(_mm256_and_si256(wv, _mm256_set1_epi16(255)),
                                               _mm256_srai_epi16(_mm256_slli_epi16(av, 8), 8));
        return acc + (vu)even + (vu)_mm256_madd_epi16(_mm256_srli_epi16(wv, 8), _mm256_srai_epi16(av, 8));
    }
#else
    for (int byte = 0; byte < 4; ++byte) {
        const int32_t factor = static_cast<int8_t>(static_cast<uint32_t>(a) >> (8 * byte));
        acc += ((w >> (8 * byte)) & 255) * factor;
    }
    return acc;
#endif
}

inline vf to_floats(vu x) { return __builtin_convertvector(x, vf); }

// tile[r][c] for MR rows and the columns [column, column + kTileColumns) of a panel.
template <int kFormat, int MR, int kPrefetch>
inline void dot8_tile(const char* panel, int column, const char* rows, int64_t row_bytes, int groups, float* tile) {
    using F = Dot8<kFormat>;
    QuantisedRow row[MR];
#pragma GCC unroll 8
    for (int r = 0; r < MR; ++r) row[r] = quantised_row(rows + r * row_bytes, groups);
    vf sum[MR][NV];
#pragma GCC unroll 8
    for (int r = 0; r < MR; ++r) {
#pragma GCC unroll 2
        for (int v = 0; v < NV; ++v) sum[r][v] = vf{};
    }
    const char* block = panel;
    for (int g = 0; g < groups; ++g, block += F::kGroupBytes) {
        vu acc[MR][NV];
#pragma GCC unroll 8
        for (int r = 0; r < MR; ++r) {
            // w's offset of 128 is taken off the exact sum.
            const vu start = F::kNibbles ? vu{} : setu(-128 * row[r].counts[g]);
#pragma GCC unroll 2
            for (int v = 0; v < NV; ++v) acc[r][v] = start;
        }
        if constexpr (kPrefetch > 0 && F::kHeader > 0) {
            __builtin_prefetch(block + kPrefetch, 0, 3);
            if constexpr (F::kHeader > 64) __builtin_prefetch(block + kPrefetch + 64, 0, 3);
        }
        const char* units = block + F::kHeader + 4 * column;
#pragma GCC unroll 8
        for (int u = 0; u < (F::kNibbles ? kUnits / 2 : kUnits); ++u) {
            if constexpr (kPrefetch > 0) {
                __builtin_prefetch(units + 128 * u + kPrefetch, 0, 3);
                if constexpr (NV * VL * 4 > 64) __builtin_prefetch(units + 128 * u + kPrefetch + 64, 0, 3);
            }
            vu low[NV], high[NV];
#pragma GCC unroll 2
            for (int v = 0; v < NV; ++v) {
                const vu x = loadu(units + 128 * u + 4 * VL * v);
                low[v] = F::kNibbles ? x & 0x0f0f0f0f : x;
                high[v] = (x >> 4) & 0x0f0f0f0f;
            }
#pragma GCC unroll 8
            for (int r = 0; r < MR; ++r) {
                int32_t a;
                std::memcpy(&a, row[r].q + g * kGroup + 4 * u, 4);
#pragma GCC unroll 2
                for (int v = 0; v < NV; ++v) acc[r][v] = dot_bytes<F::kNibbles>(acc[r][v], low[v], a);
                if constexpr (F::kNibbles) {
                    std::memcpy(&a, row[r].q + g * kGroup + 16 + 4 * u, 4);
#pragma GCC unroll 2
                    for (int v = 0; v < NV; ++v) acc[r][v] = dot_bytes<true>(acc[r][v], high[v], a);
                }
            }
        }
#pragma GCC unroll 2
        for (int v = 0; v < NV; ++v) {
            vf d = setf(1.0f), m = vf{};
            if constexpr (F::kHasScale) d = half_vector(reinterpret_cast<const uint16_t*>(block) + column + VL * v);
            if constexpr (F::kNibbles) m = half_vector(reinterpret_cast<const uint16_t*>(block) + 32 + column + VL * v);
#pragma GCC unroll 8
            for (int r = 0; r < MR; ++r) {
                const vf factor = F::kHasScale ? d * row[r].d[g] : setf(row[r].d[g]);
                sum[r][v] = fma(to_floats(acc[r][v]), factor, sum[r][v]);
                if constexpr (F::kNibbles) sum[r][v] = fma(m, setf(row[r].sums[g]), sum[r][v]);
            }
        }
    }
#pragma GCC unroll 2
    for (int v = 0; v < NV; ++v) {
        vf scale = setf(1.0f);
        if constexpr (!F::kHasScale) scale = loadf(reinterpret_cast<const float*>(block) + column + VL * v);
#pragma GCC unroll 8
        for (int r = 0; r < MR; ++r) {
            storef(tile + r * BP_PANEL + column + VL * v, F::kHasScale ? sum[r][v] : sum[r][v] * scale);
        }
    }
}

template <int kFormat, int kPrefetch>
inline void dot8_rows(int count, const char* panel, int column, const char* rows, int64_t row_bytes, int groups,
                      float* tile) {
    switch (count) {
#define BP_CASE(MR)                                                                                    \
    case MR:                                                                                           \
        if constexpr (MR <= kDotRows) {                                                                \
            return dot8_tile<kFormat, MR, kPrefetch>(panel, column, rows, row_bytes, groups, tile);    \
        }                                                                                              \
        break;
        BP_CASE(1)
        BP_CASE(2)
        BP_CASE(3)
        BP_CASE(4)
        BP_CASE(5)
#undef BP_CASE
    }
}

template <class T, int kFormat>
void dot8_gemm(Program& program, const bp_op& op, int thread) {
    using F = Dot8<kFormat>;
    const int groups = (op.k + kGroup - 1) / kGroup;
    const int64_t panel_bytes = groups * F::kGroupBytes + F::kTailBytes;
    const int m = static_cast<int>(num_rows(program, op));
    if (m == 0) return;
    const int panels = (op.n + BP_PANEL - 1) / BP_PANEL;
    const int blocks = (m + kBlockRows - 1) / kBlockRows;
    const int block_rows = (m + blocks - 1) / blocks;
    program.pool->for_units(thread, panels * blocks, [&](int unit) {
        const int number = unit / blocks, first = unit % blocks * block_rows;
        const int last = first + block_rows < m ? first + block_rows : m;
        const int n0 = number * BP_PANEL;
        const int valid = op.n - n0 < BP_PANEL ? op.n - n0 : BP_PANEL;
        const char* panel = static_cast<const char*>(op.weight) + number * panel_bytes;
        const char* in = static_cast<const char*>(op.in);
        alignas(64) float tile[kDotRows * BP_PANEL];
        for (int row = first; row < last;) {
            const int tiles = (last - row + kDotRows - 1) / kDotRows, rows = (last - row + tiles - 1) / tiles;
            for (int c = 0; c < BP_PANEL; c += kTileColumns) {
                if (m <= kDotRows) {
                    dot8_rows<kFormat, kPrefetchBytes>(rows, panel, c, in + row * op.in_stride, op.in_stride, groups, tile);
                } else {
                    dot8_rows<kFormat, 0>(rows, panel, c, in + row * op.in_stride, op.in_stride, groups, tile);
                }
            }
            epilogue<T>(op, program.step, tile, row, rows, n0, valid);
            row += rows;
        }
    });
}

template <class T>
void gemm_dot8(Program& program, const bp_op& op, int thread) {
    switch (op.dot8) {
        case BP_DOT_Q4: return dot8_gemm<T, BP_DOT_Q4>(program, op, thread);
        case BP_DOT_Q8: return dot8_gemm<T, BP_DOT_Q8>(program, op, thread);
        case BP_DOT_INT8: return dot8_gemm<T, BP_DOT_INT8>(program, op, thread);
    }
}

// Quantises the values of one group, `x(i)` a vector of VL from place i of the group on.
template <class F>
inline void quantise_group(char* row, int groups, int g, F&& x) {
    vf values[kGroup / VL], largest = vf{};
#pragma GCC unroll 8
    for (int i = 0; i < kGroup / VL; ++i) {
        values[i] = x(i * VL);
        largest = vmax(largest, vmax(values[i], -values[i]));
    }
    const float most = max_lanes(largest);
    const vf steps = setf(most > 0.0f ? 127.0f / most : 0.0f);
    vu total = vu{};
    int8_t* q = reinterpret_cast<int8_t*>(row) + g * kGroup;
#pragma GCC unroll 8
    for (int i = 0; i < kGroup / VL; ++i) {
        const vu whole = __builtin_convertvector(round_even(values[i] * steps), vu);
        total += whole;
        typedef int8_t vb __attribute__((vector_size(VL)));
        const vb bytes = __builtin_convertvector(whole, vb);
        std::memcpy(q + i * VL, &bytes, sizeof bytes);
    }
    int32_t count = 0;
    for (int lane = 0; lane < VL; ++lane) count += total[lane];
    float* d = reinterpret_cast<float*>(row + groups * kGroup);
    d[g] = most * (1.0f / 127.0f);
    d[groups + g] = d[g] * static_cast<float>(count);
    std::memcpy(d + 2 * groups + g, &count, 4);
}

// VL values of x from place i on, zero from n on.
template <class T>
inline vf load_some(const T* x, int i, int n) {
    if (i + VL <= n) return load_act(x + i);
    T rest[VL] = {};
    if (i < n) std::memcpy(rest, x + i, sizeof(T) * (n - i));
    return load_act(rest);
}

template <class T>
void quantise(Program& program, const bp_op& op, int thread) {
    const int groups = (op.n + kGroup - 1) / kGroup;
    program.pool->for_units(thread, static_cast<int>(num_rows(program, op)), [&](int row) {
        const T* x = static_cast<const T*>(op.in) + static_cast<int64_t>(row) * op.in_stride;
        char* out = static_cast<char*>(op.out) + static_cast<int64_t>(row) * op.out_stride;
        for (int g = 0; g < groups; ++g) {
            quantise_group(out, groups, g, [&](int i) { return load_some(x, g * kGroup + i, op.n); });
        }
    });
}

// RMSNorm of rows of f32 into quantised rows.
inline void norm_dot8(Program& program, const bp_op& op, int thread) {
    const float* weight = static_cast<const float*>(op.weight);
    const int groups = (op.n + kGroup - 1) / kGroup;
    program.pool->for_units(thread, static_cast<int>(num_rows(program, op)), [&](int row) {
        const int64_t source = op.rows == BP_LOGITS_ROWS ? program.step.logits_indices[row] : row;
        const float* x = static_cast<const float*>(op.in) + source * op.in_stride;
        char* out = static_cast<char*>(op.out) + static_cast<int64_t>(row) * op.out_stride;
        const vf inverse = setf(inverse_rms(x, op.n, op.eps));
        for (int g = 0; g < groups; ++g) {
            quantise_group(out, groups, g, [&](int i) {
                return load_some(x, g * kGroup + i, op.n) * inverse * load_some(weight, g * kGroup + i, op.n);
            });
        }
    });
}

// One column of a packed matrix as numbers: the embedding of a token.
template <int kFormat>
inline void unpack_column(const void* weight, int64_t column, int k, float scale, float* out) {
    using F = Dot8<kFormat>;
    const int groups = (k + kGroup - 1) / kGroup, c = static_cast<int>(column % BP_PANEL);
    const char* panel = static_cast<const char*>(weight) + column / BP_PANEL * (groups * F::kGroupBytes + F::kTailBytes);
    float whole = 1.0f;
    if (!F::kHasScale) std::memcpy(&whole, panel + groups * F::kGroupBytes + 4 * c, 4);
    for (int i = 0; i < k; ++i) {
        const char* block = panel + i / kGroup * F::kGroupBytes;
        const uint16_t* halves = reinterpret_cast<const uint16_t*>(block);
        const int at = i % kGroup, unit = F::kNibbles ? at % 16 / 4 : at / 4;
        const unsigned u = static_cast<unsigned char>(block[F::kHeader + 128 * unit + 4 * c + at % 4]);
        if constexpr (F::kNibbles) {
            const float digit = static_cast<float>(at < 16 ? u & 15u : u >> 4);
            out[i] = (half_value(halves[c]) * digit + half_value(halves[32 + c])) * scale;
        } else {
            const float d = F::kHasScale ? half_value(halves[c]) : whole;
            out[i] = d * static_cast<float>(static_cast<int>(u) - 128) * scale;
        }
    }
}

inline void embed_dot8(Program& program, const bp_op& op, int thread) {
    const bp_step& step = program.step;
    program.pool->for_units(thread, step.num_tokens, [&](int row) {
        float* out = static_cast<float*>(op.out) + static_cast<int64_t>(row) * op.out_stride;
        const int64_t token = step.token_ids[row];
        switch (op.dot8) {
            case BP_DOT_Q4: return unpack_column<BP_DOT_Q4>(op.weight, token, op.n, op.scale, out);
            case BP_DOT_Q8: return unpack_column<BP_DOT_Q8>(op.weight, token, op.n, op.scale, out);
            case BP_DOT_INT8: return unpack_column<BP_DOT_INT8>(op.weight, token, op.n, op.scale, out);
        }
    });
}

}  // namespace
}  // namespace BP_NS
