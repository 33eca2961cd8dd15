// Draws a token from a row of logits: temperature, min_p, top_k, top_p, and the first token whose running sum of weights
// exceeds the target. The same token on every instruction set: weights are made of single multiplications and additions,
// no fused ones, and sums run in an order that no vector's width decides. kernels/reference_draw.py is the definition,
// operation by operation. How many rows there are, and on which thread one runs, is the caller's business.
#pragma once

#include "draw_cut.h"

namespace BP_NS {
namespace {

using namespace biphase;

// Sums in float64 run over blocks, inside of a block in lanes of 16.
constexpr int kSumLanes = 16, kSumBlock = 512;

struct Row {
    const float* logits;
    int64_t n;
    float largest, scale, min_p;
    Cut cut;
};

// 2^((logit - largest) * scale), 1 for the largest; 0 below 2^-125 of it, so that none is denormal, and below min_p.
inline vf weights_of(const Row& row, vf logits) {
    // In this order NaN becomes the bound.
    const vf y = vmax((logits - row.largest) * row.scale, setf(-160.0f));
    const vf whole = round_even(y), f = y - whole;
    vf p = f * 1.5353361959569156e-4f + 1.3398873852565885e-3f;
    p = p * f + 9.61843691766262e-3f;
    p = p * f + 5.5503323674201965e-2f;
    p = p * f + 2.4022647738456726e-1f;
    p = p * f + 6.931471824645996e-1f;
    p = p * f + 1.0f;
    const vf w = as_vf(as_vu(p) + (__builtin_convertvector(whole, vu) << 23));
    return as_vf(as_vu(w) & (y >= -125.0f) & (w >= row.min_p));
}

inline float below(float x) {
    return std::nextafterf(x, kNone);
}

// The running sums of a block's lanes.
struct LaneSums {
#if defined(__AVX512F__)
    __m512d sums[2] = {_mm512_setzero_pd(), _mm512_setzero_pd()};
    void add(int, vf w) {
        const __m256 low = _mm512_castps512_ps256((__m512)w);
        const __m256 high = _mm256_castpd_ps(_mm512_extractf64x4_pd((__m512d)w, 1));
        sums[0] = _mm512_add_pd(sums[0], _mm512_cvtps_pd(low));
        sums[1] = _mm512_add_pd(sums[1], _mm512_cvtps_pd(high));
    }
#elif defined(__AVX2__)
    __m256d sums[4] = {_mm256_setzero_pd(), _mm256_setzero_pd(), _mm256_setzero_pd(), _mm256_setzero_pd()};
    void add(int j, vf w) {
        const __m128 low = _mm256_castps256_ps128((__m256)w), high = _mm256_extractf128_ps((__m256)w, 1);
        sums[2 * j] = _mm256_add_pd(sums[2 * j], _mm256_cvtps_pd(low));
        sums[2 * j + 1] = _mm256_add_pd(sums[2 * j + 1], _mm256_cvtps_pd(high));
    }
#else
    double sums[kSumLanes] = {};
    void add(int j, vf w) {
        for (int i = 0; i < VL; ++i) sums[j * VL + i] += static_cast<double>(w[i]);
    }
#endif
    // As a tree: halves onto halves.
    double total() const {
        double lanes[kSumLanes];
        std::memcpy(lanes, sums, sizeof lanes);
        for (int width = kSumLanes / 2; width > 0; width /= 2) {
            for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
        }
        return lanes[0];
    }
};

// Makes the weights of one block, or takes them where `kMade`, cuts them, and sums them up; `weights` (padded to 16) gets
// them where it is given.
template <bool kMade, bool kCut>
double sum_block(const Row& row, int64_t start, const float* made, float* weights) {
    const int64_t count = std::min<int64_t>(kSumBlock, row.n - start);
    const float* logits = row.logits + start;
    const vf least = setf(row.cut.least), lower = setf(below(row.cut.least));
    // Blocks are far shorter than 2^31, rows need not be.
    const int64_t up_to = std::max<int64_t>(-1, std::min<int64_t>(row.cut.last - start, kSumBlock));
    const vu last = setu(static_cast<int32_t>(up_to)), lane = iota();
    LaneSums sums;
    float padded[kSumLanes];
    for (int64_t i = 0; i < count; i += kSumLanes) {
        const float* from = logits + i;
        if (count - i < kSumLanes) {
            std::fill_n(padded, kSumLanes, kNone);
            std::copy_n(from, count - i, padded);
            from = padded;
        }
        for (int j = 0; j < kSumLanes / VL; ++j) {
            const vf logit = loadf(from + j * VL);
            vf w = kMade ? loadf(made + i + j * VL) : weights_of(row, logit);
            if (kCut) {
                const vu early = lane + static_cast<int32_t>(i + j * VL) <= last;
                const vf bound = as_vf((as_vu(lower) & early) | (as_vu(least) & ~early));
                w = as_vf(as_vu(w) & (logit > bound));
            }
            if (weights) storef(weights + i + j * VL, w);
            sums.add(j, w);
        }
    }
    return sums.total();
}

inline double sum_block(const Row& row, int64_t start, const float* made, float* weights) {
    const bool cut = row.cut.least > kNone;
    if (made) return cut ? sum_block<true, true>(row, start, made, weights) : sum_block<true, false>(row, start, made, weights);
    return cut ? sum_block<false, true>(row, start, made, weights) : sum_block<false, false>(row, start, made, weights);
}

int64_t draw_row(const float* logits, int64_t n, const bp_draw& draw, DrawScratch& scratch) {
    const bool by_rank = draw.top_k > 0 && draw.top_k < n, by_mass = draw.top_p < 1.0;
    Row row{logits, n, largest_logit(logits, n, by_rank ? scratch.maxima.data() : nullptr), 0.0f, draw.min_p, {}};
    if (!std::isfinite(row.largest)) return std::max<int64_t>(0, std::find(logits, logits + n, -kNone) - logits) % n;
    // Kept normal and finite: no difference times it may be NaN.
    const double scale = 1.4426950408889634 / draw.temperature;
    row.scale = static_cast<float>(std::min(std::max(scale, 1.1754943508222875e-38), 3.4028234663852886e38));
    if (by_rank) row.cut = top_k_cut(logits, n, draw.top_k, scratch);

    const int64_t num_blocks = (n + kSumBlock - 1) / kSumBlock;
    double* sums = scratch.block_sums.data();
    const float* made = nullptr;
    double total = 0.0;
    if (by_mass) {
        for (int64_t b = 0; b < num_blocks; ++b) {
            total += sum_block(row, b * kSumBlock, nullptr, scratch.weights.data() + b * kSumBlock);
        }
        row.cut = top_p_cut(logits, scratch.weights.data(), n, total, draw.top_p, scratch);
        made = scratch.weights.data();
    }
    auto made_of = [&](int64_t block) { return made ? made + block * kSumBlock : nullptr; };
    total = 0.0;
    for (int64_t b = 0; b < num_blocks; ++b) total += sums[b] = sum_block(row, b * kSumBlock, made_of(b), nullptr);
    const double target = draw.uniform * total;
    int64_t block = 0;
    double before = 0.0;
    // Rounding may carry the target up to the total: then the last token with any weight.
    int64_t last_block = 0;
    double before_last = 0.0;
    for (; block < num_blocks; ++block) {
        if (sums[block] > 0.0) {
            last_block = block;
            before_last = before;
        }
        if (before + sums[block] > target) break;
        before += sums[block];
    }
    float weights[kSumBlock];
    const int64_t start = last_block * kSumBlock, count = std::min<int64_t>(kSumBlock, n - start);
    sum_block(row, start, made_of(last_block), weights);
    int64_t token = 0;
    double sum = before_last;
    for (int64_t i = 0; i < count; ++i) {
        if (!(weights[i] > 0.0f)) continue;
        token = start + i;
        sum += static_cast<double>(weights[i]);
        if (sum > target) break;
    }
    return token;
}

}  // namespace
}  // namespace BP_NS
