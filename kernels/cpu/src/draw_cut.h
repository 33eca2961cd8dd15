// Where top_k and top_p cut a row of logits: the last token that stays. Where that is does not depend on how wide vectors
// are, only how it is looked for does.
#pragma once

#include <algorithm>
#include <limits>

#include "draw_scratch.h"
#include "simd.h"

namespace BP_NS {
namespace {

using namespace biphase;

// Of so many logits the largest are kept, in VL lanes.
constexpr int kMaximaGroup = 256;
constexpr int kBins = 1024;
// So few are sorted.
constexpr int kFew = 64;
constexpr float kNone = -std::numeric_limits<float>::infinity();

// Which tokens stay: those of more than `least`, and of `least` those up to id `last`.
struct Cut {
    float least = kNone;
    int64_t last = -1;
};

inline unsigned mask_of(vu lanes) {
#if defined(__AVX512F__)
    return _mm512_movepi32_mask((__m512i)lanes);
#elif defined(__AVX2__)
    return static_cast<unsigned>(_mm256_movemask_ps((__m256)lanes));
#else
    unsigned mask = 0;
    for (int i = 0; i < VL; ++i) mask |= (lanes[i] & 1u) << i;
    return mask;
#endif
}

inline vu iota() {
    vu ids = {};
    for (int i = 0; i < VL; ++i) ids[i] = i;
    return ids;
}

// The largest logit, -inf where all are banned. `maxima`, where it is given, gets VL for each whole kMaximaGroup, each the
// largest of as many logits.
inline float largest_logit(const float* logits, int64_t n, float* maxima) {
    vf all = setf(kNone);
    int64_t i = 0;
    for (; i + kMaximaGroup <= n; i += kMaximaGroup) {
        vf most = setf(kNone);
        // In this order NaN is passed over.
        for (int j = 0; j < kMaximaGroup; j += VL) most = vmax(loadf(logits + i + j), most);
        if (maxima) storef(maxima + i / kMaximaGroup * VL, most);
        all = vmax(most, all);
    }
    float lanes[VL];
    storef(lanes, all);
    float largest = kNone;
    for (float lane : lanes) largest = lane > largest ? lane : largest;
    for (; i < n; ++i) largest = logits[i] > largest ? logits[i] : largest;
    return largest;
}

// Tokens among which a cut is sought, ids upwards.
struct Candidates {
    int32_t* ids;
    float* logits;
    // Null where each counts 1.
    float* masses;
    int64_t count;

    double mass(int64_t i) const { return masses ? static_cast<double>(masses[i]) : 1.0; }

    // Drops those of other bins.
    void keep(const uint16_t* bins, uint16_t bin) {
        constexpr int64_t kRun = 32;
        int64_t kept = 0;
        for (int64_t start = 0; start < count; start += kRun) {
            const int64_t end = std::min(start + kRun, count);
            uint16_t any = 0;
            for (int64_t i = start; i < end; ++i) any |= bins[i] == bin;
            if (!any) continue;
            for (int64_t i = start; i < end; ++i) {
                if (bins[i] != bin) continue;
                ids[kept] = ids[i];
                logits[kept] = logits[i];
                if (masses) masses[kept] = masses[i];
                ++kept;
            }
        }
        count = kept;
    }
};

// Makes candidates of the tokens whose values (their weights, which become their masses, or their logits) reach `floor`.
inline void collect(Candidates& c, const float* values, float floor, const float* logits, int64_t n) {
    int64_t count = 0, i = 0;
    const vf bound = setf(floor);
    for (; i + VL <= n; i += VL) {
        const vf value = loadf(values + i);
        unsigned mask = mask_of(value >= bound);
        if (!mask) continue;
#if defined(__AVX512F__)
        const __mmask16 lanes = static_cast<__mmask16>(mask);
        const __m512i id = (__m512i)(iota() + static_cast<int32_t>(i));
        // Whole vectors, in memory with room for one more: storing some lanes alone takes longer.
        _mm512_storeu_si512(c.ids + count, _mm512_maskz_compress_epi32(lanes, id));
        storef(c.logits + count, (vf)_mm512_maskz_compress_ps(lanes, (__m512)loadf(logits + i)));
        if (c.masses) storef(c.masses + count, (vf)_mm512_maskz_compress_ps(lanes, (__m512)value));
        count += __builtin_popcount(mask);
#else
        for (; mask; mask &= mask - 1) {
            const int64_t at = i + __builtin_ctz(mask);
            c.ids[count] = static_cast<int32_t>(at);
            c.logits[count] = logits[at];
            if (c.masses) c.masses[count] = values[at];
            ++count;
        }
#endif
    }
    for (; i < n; ++i) {
        if (!(values[i] >= floor)) continue;
        c.ids[count] = static_cast<int32_t>(i);
        c.logits[count] = logits[i];
        if (c.masses) c.masses[count] = values[i];
        ++count;
    }
    c.count = count;
}

inline void extremes(const float* values, int64_t n, float* least, float* most) {
    vf low = setf(-kNone), high = setf(kNone);
    int64_t i = 0;
    for (; i + VL <= n; i += VL) {
        const vf x = loadf(values + i);
        low = vmin(x, low);
        high = vmax(x, high);
    }
    *least = -kNone;
    *most = kNone;
    float lows[VL], highs[VL];
    storef(lows, low);
    storef(highs, high);
    for (int j = 0; j < VL; ++j) {
        *least = std::min(*least, lows[j]);
        *most = std::max(*most, highs[j]);
    }
    for (; i < n; ++i) {
        *least = std::min(*least, values[i]);
        *most = std::max(*most, values[i]);
    }
}

// The cut after the largest candidates, as many as are needed for their masses to add up to `target`: of equal ones the
// lower ids, and one at least. Changes the candidates. Bins find the place of the cut; only what is near it is sorted.
inline Cut select(Candidates c, double target, DrawScratch& scratch) {
    double before = 0.0;
    bool equal = false;
    while (c.count > kFew) {
        float least, most;
        extremes(c.logits, c.count, &least, &most);
        if ((equal = least == most)) break;
        const double high = most, scale = (kBins - 1) / (high - static_cast<double>(least));
        double* sums = scratch.bin_sums.data();
        std::fill_n(sums, kBins, 0.0);
        uint16_t* bins = scratch.bins.data();
        for (int64_t i = 0; i < c.count; ++i) {
            bins[i] = static_cast<uint16_t>(static_cast<int32_t>((high - static_cast<double>(c.logits[i])) * scale));
        }
        if (c.masses) {
            for (int64_t i = 0; i < c.count; ++i) sums[bins[i]] += static_cast<double>(c.masses[i]);
        } else {
            for (int64_t i = 0; i < c.count; ++i) sums[bins[i]] += 1.0;
        }
        int at = 0;
        for (; at < kBins; ++at) {
            const double after = before + sums[at];
            if (after >= target) break;
            before = after;
        }
        // The target is more than the sum of all, by rounding.
        if (at == kBins) return {};
        c.keep(bins, static_cast<uint16_t>(at));
    }
    int32_t order[kFew];
    if (!equal) {
        for (int i = 0; i < c.count; ++i) order[i] = i;
        std::sort(order, order + c.count, [&](int32_t a, int32_t b) {
            return c.logits[a] > c.logits[b] || (c.logits[a] == c.logits[b] && a < b);
        });
    }
    Cut cut;
    for (int64_t i = 0; i < c.count; ++i) {
        const int64_t at = equal ? i : order[i];
        if (before > 0.0 && before >= target) break;
        cut = {c.logits[at], c.ids[at]};
        before += c.mass(at);
    }
    return cut;
}

// A logit that at least `count` reach: the count-th largest of some maxima; -inf if there are fewer. Changes `maxima`.
inline float reached_by(float* maxima, int64_t num_maxima, int64_t count) {
    if (count > num_maxima) return kNone;
    for (; num_maxima % 2 == 0 && num_maxima / 2 >= 2 * count; num_maxima /= 2) {
        for (int64_t i = 0; i < num_maxima / 2; ++i) {
            maxima[i] = maxima[i] > maxima[i + num_maxima / 2] ? maxima[i] : maxima[i + num_maxima / 2];
        }
    }
    std::nth_element(maxima, maxima + count - 1, maxima + num_maxima, [](float a, float b) { return a > b; });
    return maxima[count - 1];
}

inline Cut top_k_cut(const float* logits, int64_t n, int64_t top_k, DrawScratch& scratch) {
    const float floor = reached_by(scratch.maxima.data(), n / kMaximaGroup * VL, top_k);
    // Banned ones are no candidates.
    const float bound = std::max(floor, std::numeric_limits<float>::lowest());
    Candidates c{scratch.ids.data(), scratch.logits.data(), nullptr, 0};
    collect(c, logits, bound, logits, n);
    if (c.count < top_k) return {};
    return select(c, static_cast<double>(top_k), scratch);
}

inline Cut top_p_cut(const float* logits, const float* weights, int64_t n, double mass, double top_p, DrawScratch& scratch) {
    // All weights below this one together are less than half of what top_p leaves out.
    const float floor = static_cast<float>(0.5 * (1.0 - top_p) * mass / static_cast<double>(n));
    const float bound = std::max(floor, std::numeric_limits<float>::min());
    Candidates c{scratch.ids.data(), scratch.logits.data(), scratch.masses.data(), 0};
    collect(c, weights, bound, logits, n);
    return select(c, top_p * mass, scratch);
}

}  // namespace
}  // namespace BP_NS
