// The multiplier of machines with AMX: tiles of 16 rows by 16 columns, 32 steps of bfloat16 at a time.
//
// A panel is what a tile wants as it lies: 16 units of k, 128 bytes apart, by two times 16 columns. Every element of C is
// one chain over blocks of 32 steps in ascending order, whatever the tile and whatever shares it, so bits depend on its
// row of A and its column of B alone. They are other bits than those of micro.h: the instruction sums a block's even and
// odd steps apart.
#pragma once

#include "quant.h"
#include "simd.h"

#if defined(__AMX_BF16__)

namespace BP_NS {
namespace {

constexpr int kAmxRows = 16;
// Rows that one pass over a panel serves: two tiles.
constexpr int kAmxBlockRows = 2 * kAmxRows;
// Units of k in a tile.
constexpr int kAmxUnits = 16;
constexpr int kAmxPrefetchBytes = 4096;

// The compiler knows nothing of the memory that tile instructions read.
inline void settle_memory() { asm volatile("" ::: "memory"); }

// Tiles 0 and 1 are C of the upper rows, 2 and 3 of the lower ones; 4 and 5 are A, 6 and 7 B. Clears all of them.
inline void configure_tiles(int upper, int lower) {
    alignas(64) uint8_t config[64] = {1};
    auto shape = [&](int tile, int rows) {
        config[16 + 2 * tile] = rows > 0 ? 64 : 0;
        config[48 + tile] = static_cast<uint8_t>(rows);
    };
    shape(0, upper);
    shape(1, upper);
    shape(2, lower);
    shape(3, lower);
    shape(4, upper);
    shape(5, lower);
    shape(6, kAmxUnits);
    shape(7, kAmxUnits);
    settle_memory();
    _tile_loadconfig(config);
}

// C += A * B over `blocks` blocks. kPrefetch: B passes once, from memory.
template <bool kTwo, bool kPrefetch>
inline void multiply_tiles(const uint32_t* a, int64_t a_row, const uint32_t* b, int64_t blocks) {
    const int64_t a_bytes = a_row * 4;
    settle_memory();
    for (; blocks > 0; --blocks, a += kAmxUnits, b += kAmxUnits * BP_PANEL) {
        if constexpr (kPrefetch) {
            const char* ahead = reinterpret_cast<const char*>(b) + kAmxPrefetchBytes;
#pragma GCC unroll 32
            for (int line = 0; line < kAmxUnits * BP_PANEL * 4 / 64; ++line) __builtin_prefetch(ahead + 64 * line, 0, 3);
        }
        _tile_loadd(6, b, BP_PANEL * 4);
        _tile_loadd(7, b + kAmxRows, BP_PANEL * 4);
        _tile_loadd(4, a, a_bytes);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if constexpr (kTwo) {
            _tile_loadd(5, a + kAmxRows * a_row, a_bytes);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
}

template <bool kPrefetch>
inline void multiply_some(const uint32_t* a, int64_t a_row, int rows, const uint32_t* b, int64_t blocks) {
    if (rows > kAmxRows) {
        multiply_tiles<true, kPrefetch>(a, a_row, b, blocks);
    } else {
        multiply_tiles<false, kPrefetch>(a, a_row, b, blocks);
    }
}

// Makes C ready for `rows` rows.
inline void begin_tiles(int rows) {
    configure_tiles(rows < kAmxRows ? rows : kAmxRows, rows > kAmxRows ? rows - kAmxRows : 0);
}

// C to tile[rows][BP_PANEL].
inline void store_tiles(int rows, float* tile) {
    constexpr int kRowBytes = BP_PANEL * 4;
    _tile_stored(0, tile, kRowBytes);
    _tile_stored(1, tile + kAmxRows, kRowBytes);
    if (rows > kAmxRows) {
        _tile_stored(2, tile + kAmxRows * BP_PANEL, kRowBytes);
        _tile_stored(3, tile + kAmxRows * BP_PANEL + kAmxRows, kRowBytes);
    }
}

// The last `units` of k, fewer than a block, filled up with zeros on both sides.
inline void multiply_rest(const uint32_t* a, int64_t a_row, int rows, const uint32_t* b, int units) {
    alignas(64) uint32_t left[kAmxBlockRows * kAmxUnits] = {};
    alignas(64) uint32_t right[kAmxUnits * BP_PANEL] = {};
    for (int r = 0; r < rows; ++r) std::memcpy(left + r * kAmxUnits, a + r * a_row, sizeof(uint32_t) * units);
    std::memcpy(right, b, sizeof(uint32_t) * units * BP_PANEL);
    multiply_some<false>(left, kAmxUnits, rows, right, 1);
}

// tile[rows][BP_PANEL] = A * panel, `units` of k, up to kAmxBlockRows rows.
inline void multiply_panel_amx(const uint32_t* a, int64_t a_row, int rows, const uint32_t* panel, int64_t units,
                               float* tile, bool single) {
    begin_tiles(rows);
    const int64_t blocks = units / kAmxUnits, done = blocks * kAmxUnits;
    if (single) {
        multiply_some<true>(a, a_row, rows, panel, blocks);
    } else {
        multiply_some<false>(a, a_row, rows, panel, blocks);
    }
    if (done < units) multiply_rest(a + done, a_row, rows, panel + done * BP_PANEL, static_cast<int>(units - done));
    store_tiles(rows, tile);
}

// The same for a panel of GGUF blocks, decoded a piece at a time so that it is still in L1 when it is multiplied.
inline void multiply_packed_amx(const uint32_t* a, int64_t a_row, int rows, const char* packed, int format,
                                int64_t count, bf16* decoded, float* tile) {
    constexpr int kPiece = 6;
    begin_tiles(rows);
    for (int64_t b = 0; b < count; b += kPiece) {
        const int64_t some = count - b < kPiece ? count - b : kPiece;
        decode_panel(packed + b * block_bytes(format), format, some, decoded);
        multiply_some<false>(a + b * kAmxUnits, a_row, rows, reinterpret_cast<const uint32_t*>(decoded), some);
    }
    store_tiles(rows, tile);
}

}  // namespace
}  // namespace BP_NS

#endif
