// Memory that drawing from a row of `n` logits needs, apart from the row. A thread keeps its own: fresh memory in every step
// costs more than the arithmetic.
#pragma once

#include <cstdint>
#include <vector>

namespace biphase {

struct DrawScratch {
    // Weights of the row, in blocks of 512.
    std::vector<float> weights;
    // Candidates for a cut; their ids have room for one vector more.
    std::vector<float> logits, masses;
    std::vector<int32_t> ids;
    std::vector<uint16_t> bins;
    std::vector<float> maxima;
    std::vector<double> bin_sums, block_sums;

    void reserve(int64_t n) {
        const size_t padded = static_cast<size_t>((n + 1023) / 512 * 512);
        if (weights.size() >= padded) return;
        for (auto* floats : {&weights, &logits, &masses, &maxima}) floats->resize(padded);
        ids.resize(padded);
        bins.resize(padded);
        bin_sums.resize(1024);
        block_sums.resize(padded / 512);
    }
};

}  // namespace biphase
