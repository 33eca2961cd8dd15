// Paged attention over ragged sequences: causal, grouped heads, sliding window, soft cap; by online softmax over blocks
// of kKeys keys at absolute positions. One read of K and V serves all heads of a group.
//
// Two kernels, for units of few query rows and of many, give the same bits: a query's result depends on its own row and
// its sequence's K and V alone. The order of every sum is fixed by key position, and a masked key adds an exact zero.
// Slots past the end of a sequence are never read.
#pragma once

#include "attention_amx.h"
#include "attention_few.h"
#include "attention_many.h"

namespace BP_NS {
namespace {

template <class T>
size_t attention_scratch_bytes(const bp_model& m) {
    const int64_t few = few_rows_words<T>(m), many = many_rows_words<T>(m);
    int64_t most = few > many ? few : many;
#if defined(__AMX_BF16__)
    if (amx_rows_words(m) > most) most = amx_rows_words(m);
#endif
    return static_cast<size_t>(most) * 4;
}

template <class T>
void attention(Program& program, const bp_op& op, int thread) {
#if defined(__AMX_BF16__)
    if (sizeof(T) == 2 && attends_by_amx(program.model)) {
        configure_tiles(kAmxRows, kAmxRows);
        auto attend = [&](int i) {
            attend_amx(program, op, thread, program.units[i], i + 1 < program.num_units ? program.units + i + 1 : nullptr);
        };
        program.pool->for_units(thread, program.num_units, attend, program.ends);
        _tile_release();
        return;
    }
#endif
    auto run = [&](int i) {
        const AttentionUnit& unit = program.units[i];
        if (unit.count <= kFewRows<T> && program.model.head_dim % VL == 0) {
            attend_few<T>(program, op, thread, unit, i + 1 < program.num_units ? &unit + 1 : nullptr);
        } else {
            attend_many<T>(program, op, thread, unit);
        }
    };
    program.pool->for_units(thread, program.num_units, run, program.ends);
}

}  // namespace
}  // namespace BP_NS
