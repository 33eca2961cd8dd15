// The microkernel: a small tile of C = A * B, the only multiplier in here. GEMM and attention are both built from it.
//
// A's units are broadcast, B's rows of units are vectors, every element of C is one chain of dot products over k in
// ascending order. So an element's bits depend on its own row of A and column of B alone, never on the tile it is in.
#pragma once

#include "simd.h"

namespace BP_NS {
namespace {

// Largest tile that the registers hold: MR rows by NV vectors.
#if defined(__AVX512F__)
constexpr int NV = 2;
template <class T>
constexpr int kMaxRows = 12;
#elif defined(__AVX2__)
constexpr int NV = 2;
template <class T>
constexpr int kMaxRows = sizeof(T) == 4 ? 6 : 4;
#else
constexpr int NV = 2;
template <class T>
constexpr int kMaxRows = 4;
#endif
constexpr int kTileColumns = NV * VL;

struct MicroArgs {
    const uint32_t* a;
    int64_t a_row;  // units from a row to the next
    int64_t a_k;    // units from one k to the next
    const uint32_t* b;
    int64_t b_k;
    int64_t k;
    float* c;
    int64_t c_row;
    bool accumulate;
};

// kPrefetch: bytes of B to ask for ahead of use, 0 for none. AK: a_k where it is known to be 1, else 0.
template <class T, int MR, int N, int AK, int kPrefetch>
inline void micro(const MicroArgs& args) {
    const uint32_t* __restrict a = args.a;
    const uint32_t* __restrict b = args.b;
    const int64_t a_row = args.a_row, b_k = args.b_k, a_k = AK ? AK : args.a_k;
    float* __restrict c = args.c;
    vf acc[MR][N];
#pragma GCC unroll 16
    for (int r = 0; r < MR; ++r) {
#pragma GCC unroll 4
        for (int v = 0; v < N; ++v) acc[r][v] = vf{};
    }
    if (args.accumulate) {
#pragma GCC unroll 16
        for (int r = 0; r < MR; ++r) {
#pragma GCC unroll 4
            for (int v = 0; v < N; ++v) acc[r][v] = loadf(c + r * args.c_row + v * VL);
        }
    }
    for (int64_t k = args.k; k > 0; --k) {
        vu bv[N];
#pragma GCC unroll 4
        for (int v = 0; v < N; ++v) bv[v] = loadu(b + v * VL);
        if constexpr (kPrefetch > 0) {
            __builtin_prefetch(reinterpret_cast<const char*>(b) + kPrefetch, 0, 3);
            if constexpr (N * VL * 4 > 64) __builtin_prefetch(reinterpret_cast<const char*>(b) + kPrefetch + 64, 0, 3);
        }
#pragma GCC unroll 16
        for (int r = 0; r < MR; ++r) {
            vu av = setu(static_cast<int32_t>(a[r * a_row]));
#pragma GCC unroll 4
            for (int v = 0; v < N; ++v) acc[r][v] = dot<T>(acc[r][v], av, bv[v]);
        }
        a += a_k;
        b += b_k;
    }
#pragma GCC unroll 16
    for (int r = 0; r < MR; ++r) {
#pragma GCC unroll 4
        for (int v = 0; v < N; ++v) storef(c + r * args.c_row + v * VL, acc[r][v]);
    }
}

template <class T, int N, int AK, int kPrefetch>
inline void micro_rows(int rows, const MicroArgs& args) {
    switch (rows) {
#define BP_CASE(MR)                                                                   \
    case MR:                                                                          \
        if constexpr (MR <= kMaxRows<T> && MR * N <= kMaxRows<T> * NV) {              \
            return micro<T, MR, N, AK, kPrefetch>(args);                              \
        }                                                                             \
        break;
        BP_CASE(1)
        BP_CASE(2)
        BP_CASE(3)
        BP_CASE(4)
        BP_CASE(5)
        BP_CASE(6)
        BP_CASE(7)
        BP_CASE(8)
        BP_CASE(9)
        BP_CASE(10)
        BP_CASE(11)
        BP_CASE(12)
#undef BP_CASE
    }
}

// One tile after another over `columns`, a multiple of VL, of B and C; few rows take wide tiles, so that enough chains
// of sums are under way to hide their latency.
template <class T>
inline void micro_columns(int rows, MicroArgs args, int columns) {
    while (columns > 0) {
        int width = VL;
        if (columns >= 4 * VL && 4 * rows <= kMaxRows<T> * NV) {
            width = 4 * VL;
            micro_rows<T, 4, 1, 0>(rows, args);
        } else if (columns >= NV * VL) {
            width = NV * VL;
            micro_rows<T, NV, 1, 0>(rows, args);
        } else {
            micro_rows<T, 1, 1, 0>(rows, args);
        }
        columns -= width;
        args.b += width;
        args.c += width;
    }
}

// Rows of the next tile where `left` rows are left: tiles of nearly equal height.
template <class T>
inline int next_rows(int left) {
    int tiles = (left + kMaxRows<T> - 1) / kMaxRows<T>;
    return (left + tiles - 1) / tiles;
}

}  // namespace
}  // namespace BP_NS
