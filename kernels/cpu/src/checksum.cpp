// XXH3-64 (seed 0) of many runs of bytes in one call: the algorithm of Yann Collet's xxHash 0.8, for runs of more than
// 240 bytes. Hashing is as fast as its loads, so lines are asked for long before they are hashed, those of the runs that
// follow too: blocks lie scattered, and what the processor prefetches by itself stops at every page.
#include <cstring>

#include "abi.h"

#if defined(__x86_64__)
#include <immintrin.h>
#define BP_TARGET(isa) __attribute__((target(isa)))
#endif

namespace {

constexpr int64_t kStripe = 64, kBlock = 1024;
// So many bytes: below 8 KiB the loads still wait.
constexpr int64_t kAhead = 12288;
// What the last stripe of a run, and the scrambling after each block, take of the secret.
constexpr int64_t kLastSecret = 121, kScrambleSecret = 128, kMergeSecret = 11;

constexpr uint64_t kPrime32_1 = 0x9E3779B1u, kPrime32_2 = 0x85EBCA77u, kPrime32_3 = 0xC2B2AE3Du;
constexpr uint64_t kPrime64_1 = 0x9E3779B185EBCA87u, kPrime64_2 = 0xC2B2AE3D27D4EB4Fu;
constexpr uint64_t kPrime64_3 = 0x165667B19E3779F9u, kPrime64_4 = 0x85EBCA77C2B2AE63u;
constexpr uint64_t kPrime64_5 = 0x27D4EB2F165667C5u;

alignas(64) constexpr uint64_t kStart[8] = {kPrime32_3, kPrime64_1, kPrime64_2, kPrime64_3,
                                            kPrime64_4, kPrime32_2, kPrime64_5, kPrime32_1};
alignas(64) constexpr uint8_t kSecret[192] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

uint64_t word(const uint8_t* at) {
    uint64_t value;
    std::memcpy(&value, at, 8);
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    value = __builtin_bswap64(value);
#endif
    return value;
}

uint64_t folded(uint64_t a, uint64_t b) {
    const unsigned __int128 product = static_cast<unsigned __int128>(a) * b;
    return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

uint64_t merged(const uint64_t* acc, int64_t length) {
    uint64_t sum = static_cast<uint64_t>(length) * kPrime64_1;
    for (int i = 0; i < 8; i += 2) {
        sum += folded(acc[i] ^ word(kSecret + kMergeSecret + 8 * i), acc[i + 1] ^ word(kSecret + kMergeSecret + 8 * i + 8));
    }
    sum = (sum ^ sum >> 37) * 0x165667919E3779F9u;
    return sum ^ sum >> 32;
}

// Asks for the lines that will be hashed `kAhead` bytes later, over the ends of runs.
class Prefetch {
  public:
    Prefetch(const bp_span* spans, int64_t num_spans) : span_(spans), end_(spans + num_spans) { operator()(kAhead); }

    void operator()(int64_t num_bytes) {
        while (num_bytes > 0 && span_ != end_) {
            const int64_t step = num_bytes < span_->length - at_ ? num_bytes : span_->length - at_;
            const uint8_t* from = static_cast<const uint8_t*>(span_->start) + at_;
            // Into the second-level cache: it takes several times as many requests at once as the first.
            for (int64_t i = 0; i < step; i += kStripe) __builtin_prefetch(from + i, 0, 2);
            num_bytes -= step;
            at_ += step;
            if (at_ == span_->length) {
                ++span_;
                at_ = 0;
            }
        }
    }

  private:
    const bp_span* span_;
    const bp_span* end_;
    int64_t at_ = 0;
};

// One run: `add(acc, data, secret)` takes a stripe, `scramble(acc)` ends a block.
#define BP_RUN(add, scramble)                                                                             \
    const int64_t num_blocks = (length - 1) / kBlock;                                                     \
    for (int64_t block = 0; block < num_blocks; ++block) {                                                \
        prefetch(kBlock);                                                                                 \
        for (int64_t i = 0; i < kBlock; i += kStripe) add(acc, run + block * kBlock + i, kSecret + i / 8); \
        scramble(acc);                                                                                    \
    }                                                                                                     \
    const int64_t done = num_blocks * kBlock, rest = (length - 1 - done) / kStripe * kStripe;             \
    prefetch(length - done);                                                                              \
    for (int64_t i = 0; i < rest; i += kStripe) add(acc, run + done + i, kSecret + i / 8);                \
    add(acc, run + length - kStripe, kSecret + kLastSecret);

void add_plain(uint64_t* acc, const uint8_t* data, const uint8_t* secret) {
    for (int i = 0; i < 8; ++i) {
        const uint64_t value = word(data + 8 * i), mixed = value ^ word(secret + 8 * i);
        acc[i ^ 1] += value;
        acc[i] += (mixed & 0xffffffffu) * (mixed >> 32);
    }
}

void scramble_plain(uint64_t* acc) {
    for (int i = 0; i < 8; ++i) {
        acc[i] = (acc[i] ^ acc[i] >> 47 ^ word(kSecret + kScrambleSecret + 8 * i)) * kPrime32_1;
    }
}

uint64_t sum_plain(const uint8_t* run, int64_t length, Prefetch& prefetch) {
    uint64_t acc[8];
    std::memcpy(acc, kStart, sizeof acc);
    BP_RUN(add_plain, scramble_plain)
    return merged(acc, length);
}

#if defined(__x86_64__)

BP_TARGET("avx2") inline void add_avx2(__m256i* acc, const uint8_t* data, const uint8_t* secret) {
    for (int i = 0; i < 2; ++i) {
        const __m256i value = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(data) + i);
        const __m256i key = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(secret) + i);
        const __m256i mixed = _mm256_xor_si256(value, key);
        const __m256i product = _mm256_mul_epu32(mixed, _mm256_srli_epi64(mixed, 32));
        acc[i] = _mm256_add_epi64(_mm256_add_epi64(acc[i], _mm256_shuffle_epi32(value, 0x4E)), product);
    }
}

BP_TARGET("avx2") inline void scramble_avx2(__m256i* acc) {
    const __m256i prime = _mm256_set1_epi64x(kPrime32_1);
    for (int i = 0; i < 2; ++i) {
        const __m256i key = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(kSecret + kScrambleSecret) + i);
        const __m256i mixed = _mm256_xor_si256(_mm256_xor_si256(acc[i], _mm256_srli_epi64(acc[i], 47)), key);
        const __m256i high = _mm256_mul_epu32(_mm256_srli_epi64(mixed, 32), prime);
        acc[i] = _mm256_add_epi64(_mm256_mul_epu32(mixed, prime), _mm256_slli_epi64(high, 32));
    }
}

BP_TARGET("avx2") uint64_t sum_avx2(const uint8_t* run, int64_t length, Prefetch& prefetch) {
    __m256i acc[2];
    std::memcpy(acc, kStart, sizeof acc);
    BP_RUN(add_avx2, scramble_avx2)
    uint64_t sums[8];
    std::memcpy(sums, acc, sizeof sums);
    return merged(sums, length);
}

BP_TARGET("avx512f") inline void add_avx512(__m512i& acc, const uint8_t* data, const uint8_t* secret) {
    const __m512i value = _mm512_loadu_si512(data), mixed = _mm512_xor_si512(value, _mm512_loadu_si512(secret));
    const __m512i product = _mm512_mul_epu32(mixed, _mm512_srli_epi64(mixed, 32));
    acc = _mm512_add_epi64(_mm512_add_epi64(acc, _mm512_shuffle_epi32(value, static_cast<_MM_PERM_ENUM>(0x4E))), product);
}

BP_TARGET("avx512f") inline void scramble_avx512(__m512i& acc) {
    const __m512i prime = _mm512_set1_epi64(kPrime32_1), key = _mm512_loadu_si512(kSecret + kScrambleSecret);
    const __m512i mixed = _mm512_xor_si512(_mm512_xor_si512(acc, _mm512_srli_epi64(acc, 47)), key);
    const __m512i high = _mm512_mul_epu32(_mm512_srli_epi64(mixed, 32), prime);
    acc = _mm512_add_epi64(_mm512_mul_epu32(mixed, prime), _mm512_slli_epi64(high, 32));
}

BP_TARGET("avx512f") uint64_t sum_avx512(const uint8_t* run, int64_t length, Prefetch& prefetch) {
    __m512i acc = _mm512_loadu_si512(kStart);
    BP_RUN(add_avx512, scramble_avx512)
    uint64_t sums[8];
    std::memcpy(sums, &acc, sizeof sums);
    return merged(sums, length);
}

#endif

}  // namespace

extern "C" void bp_sum_blocks(const bp_span* spans, int64_t num_spans, const uint64_t* ids, int32_t isa, uint64_t* sums) {
    auto* sum = sum_plain;
#if defined(__x86_64__)
    if (isa >= BP_AVX512) {
        sum = sum_avx512;
    } else if (isa >= BP_AVX2) {
        sum = sum_avx2;
    }
#endif
    Prefetch prefetch(spans, num_spans);
    for (int64_t i = 0; i < num_spans; ++i) {
        sums[i] = sum(static_cast<const uint8_t*>(spans[i].start), spans[i].length, prefetch);
    }
    // Of the sums, the ids, and zeros up to the least that is hashed like this.
    uint64_t sealed[BP_MAX_SUMS * 2] = {};
    const int64_t bytes = num_spans * 8;
    std::memcpy(sealed, sums, bytes);
    std::memcpy(sealed + num_spans, ids, bytes);
    const bp_span all = {sealed, 2 * bytes < BP_MIN_SEALED ? BP_MIN_SEALED : 2 * bytes};
    Prefetch nothing(&all, 0);
    sums[num_spans] = sum(static_cast<const uint8_t*>(all.start), all.length, nothing);
}
