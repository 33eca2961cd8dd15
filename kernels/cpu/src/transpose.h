// Tiles of 32-bit units turned around, so that rows of the KV cache become vectors with a key in each lane.
#pragma once

#include "simd.h"

namespace BP_NS {
namespace {

#if defined(__AVX512F__)
// VL rows of VL units, from unit `at` on, to VL columns, out_row units apart.
inline void transpose_tile(const uint32_t* const* rows, int at, uint32_t* out, int64_t out_row) {
    __m512i r[16], t[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) r[i] = _mm512_loadu_si512(rows[i] + at);
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
        t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
        t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
        r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
        r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
        r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
    }
    // r[4 * i + j] holds, in lane group g, column 4 * g + j of rows 4 * i .. 4 * i + 3.
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
        __m512i low01 = _mm512_shuffle_i32x4(r[j], r[4 + j], 0x88), high01 = _mm512_shuffle_i32x4(r[j], r[4 + j], 0xdd);
        __m512i low23 = _mm512_shuffle_i32x4(r[8 + j], r[12 + j], 0x88);
        __m512i high23 = _mm512_shuffle_i32x4(r[8 + j], r[12 + j], 0xdd);
        _mm512_storeu_si512(out + j * out_row, _mm512_shuffle_i32x4(low01, low23, 0x88));
        _mm512_storeu_si512(out + (4 + j) * out_row, _mm512_shuffle_i32x4(high01, high23, 0x88));
        _mm512_storeu_si512(out + (8 + j) * out_row, _mm512_shuffle_i32x4(low01, low23, 0xdd));
        _mm512_storeu_si512(out + (12 + j) * out_row, _mm512_shuffle_i32x4(high01, high23, 0xdd));
    }
}
#else
inline void transpose_tile(const uint32_t* const* rows, int at, uint32_t* out, int64_t out_row) {
    for (int i = 0; i < VL; ++i) {
        for (int j = 0; j < VL; ++j) out[j * out_row + i] = rows[i][at + j];
    }
}
#endif

// out[u][i] = rows[i][u]; `count`, a multiple of VL, rows of `units` units.
inline void transpose_rows(const uint32_t* const* rows, int count, int units, uint32_t* out, int64_t out_row) {
    for (int i = 0; i < count; i += VL) {
        int u = 0;
        for (; u + VL <= units; u += VL) transpose_tile(rows + i, u, out + u * out_row + i, out_row);
        for (; u < units; ++u) {
            for (int j = 0; j < VL; ++j) out[u * out_row + i + j] = rows[i + j][u];
        }
    }
}

}  // namespace
}  // namespace BP_NS
