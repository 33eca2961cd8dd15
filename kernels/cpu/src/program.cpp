// Runs a tape of ops over a batch: chooses the instruction set, plans the attention work of a step, owns the memory
// that the threads need. What an op computes is in the kernels.
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>
#include <vector>

#include "context.h"

namespace biphase {
namespace {

constexpr size_t kHugePage = size_t{2} << 20;

double now() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

const Kernels* kernels_for(int32_t isa, int32_t dtype) {
    switch (isa) {
        case BP_GENERIC: return generic_kernels(dtype);
#if defined(__x86_64__)
        case BP_AVX2: return avx2_kernels(dtype);
        case BP_AVX512: return avx512_kernels(dtype);
        case BP_AVX512_BF16: return avx512_bf16_kernels(dtype);
#if defined(BP_WITH_AMX)
        case BP_AMX: return amx_kernels(dtype);
#endif
#endif
        default: return nullptr;
    }
}

#if defined(BP_WITH_AMX)
// Whether the processor has tiles of bfloat16 and of int8, and the kernel lets this process use them: it asks to be asked.
bool has_amx() {
    unsigned a = 0, b = 0, c = 0, d = 0;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
    constexpr unsigned kBf16 = 1u << 22, kTile = 1u << 24, kInt8 = 1u << 25;
    if ((d & (kBf16 | kTile | kInt8)) != (kBf16 | kTile | kInt8)) return false;
    constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}
#endif

}  // namespace

// A program and what is private to running it.
struct Runner : Program {
    const Kernels* kernels = nullptr;
    std::vector<bp_op> tape;
    std::vector<AttentionUnit> unit_storage, sorted;
    std::vector<double> seconds;
    bool profiling = false;

    void plan_attention();
    void run_op(const bp_op& op, int thread);
    static void run_tape(void* runner, int thread);
};

// Cuts the batch's queries into units and deals them out: heavy ones first, and to every thread a fair hand.
void Runner::plan_attention() {
    sorted.clear();
    const int group = model.num_heads / model.num_kv_heads, rows_per_unit = kernels->attention_rows;
    for (int s = 0; s < step.num_seqs; ++s) {
        const int queries = step.query_start_loc[s + 1] - step.query_start_loc[s];
        const int before = step.seq_lens[s] - queries;
        for (int first = 0; first < queries * group; first += rows_per_unit) {
            const int count = std::min(rows_per_unit, queries * group - first);
            const int64_t keys = before + (first + count - 1) / group + 1;
            const int64_t tiles = (count + 31) / 32;
            for (int h = 0; h < model.num_kv_heads; ++h) sorted.push_back({s, h, first, count, keys * (tiles + 1)});
        }
    }
    std::stable_sort(sorted.begin(), sorted.end(),
                     [](const AttentionUnit& a, const AttentionUnit& b) { return a.cost > b.cost; });
    num_units = static_cast<int32_t>(sorted.size());
    unit_storage.resize(sorted.size());
    units = unit_storage.data();
    // Dealt out in turn, the heads of a (sequence, rows) together where there is enough for all: they share pages.
    const int n = pool->num_threads();
    const size_t hand = sorted.size() >= static_cast<size_t>(4 * n * model.num_kv_heads)
                            ? static_cast<size_t>(model.num_kv_heads) : 1;
    size_t next = 0;
    for (int t = 0; t < n; ++t) {
        for (size_t i = hand * t; i < sorted.size(); i += hand * n) {
            for (size_t j = i; j < i + hand && j < sorted.size(); ++j) units[next++] = sorted[j];
        }
        ends[t] = static_cast<int32_t>(next);
    }
}

void Runner::run_op(const bp_op& op, int thread) {
    switch (op.kind) {
        case BP_EMBED: return kernels->embed(*this, op, thread);
        case BP_NORM: return kernels->norm(*this, op, thread);
        case BP_NORM_ADD: return kernels->norm_add(*this, op, thread);
        case BP_GEMM: return kernels->gemm(*this, op, thread);
        case BP_ROPE_STORE: return kernels->rope_store(*this, op, thread);
        case BP_ATTENTION: return kernels->attention(*this, op, thread);
        case BP_QUANTISE: return kernels->quantise(*this, op, thread);
        case BP_NORM_DOT8: return kernels->norm_dot8(*this, op, thread);
        case BP_GEMM_DOT8: return kernels->gemm_dot8(*this, op, thread);
        case BP_EMBED_DOT8: return kernels->embed_dot8(*this, op, thread);
    }
}

void Runner::run_tape(void* argument, int thread) {
    Runner& runner = *static_cast<Runner*>(argument);
    double before = runner.profiling ? now() : 0.0;
    for (int i = 0; i < runner.num_ops; ++i) {
        runner.run_op(runner.ops[i], thread);
        // The pool ends a run with a barrier of its own.
        if (i + 1 < runner.num_ops) runner.pool->barrier(thread);
        if (runner.profiling && thread == 0) {
            double after = now();
            runner.seconds[i] += after - before;
            before = after;
        }
    }
}

}  // namespace biphase

using namespace biphase;

extern "C" {

int32_t bp_abi_version() { return BP_ABI_VERSION; }

int32_t bp_best_isa() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512dq")) {
        if (!__builtin_cpu_supports("avx512bf16")) return BP_AVX512;
#if defined(BP_WITH_AMX)
        static const bool amx = has_amx();
        if (amx && __builtin_cpu_supports("avx512vnni")) return BP_AMX;
#endif
        return BP_AVX512_BF16;
    }
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return BP_AVX2;
#endif
    return BP_GENERIC;
}

void* bp_arena_alloc(size_t bytes) {
    bytes = (bytes + kHugePage - 1) / kHugePage * kHugePage;
    char* base = static_cast<char*>(
        mmap(nullptr, bytes + kHugePage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    if (base == MAP_FAILED) return nullptr;
    char* start = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(base) + kHugePage - 1) / kHugePage * kHugePage);
    if (start > base) munmap(base, static_cast<size_t>(start - base));
    munmap(start + bytes, static_cast<size_t>(base + kHugePage - start));
    madvise(start, bytes, MADV_HUGEPAGE);
    return start;
}

void bp_arena_free(void* memory, size_t bytes) {
    munmap(memory, (bytes + kHugePage - 1) / kHugePage * kHugePage);
}

void* bp_program_create(const bp_model* model, const bp_op* ops, int32_t num_ops, int32_t num_threads, int32_t nice,
                        int32_t isa) {
    const Kernels* kernels = isa <= bp_best_isa() ? kernels_for(isa, model->dtype) : nullptr;
    if (!kernels || num_threads < 1) return nullptr;
    Runner* runner = new (std::nothrow) Runner();
    if (!runner) return nullptr;
    runner->model = *model;
    runner->tape.assign(ops, ops + num_ops);
    runner->ops = runner->tape.data();
    runner->num_ops = num_ops;
    runner->kernels = kernels;
    runner->seconds.assign(static_cast<size_t>(num_ops), 0.0);
    runner->pool = new Pool(std::min(num_threads, kMaxThreads), nice);
    size_t bytes = kernels->attention_scratch_bytes(*model);
    for (const bp_op& op : runner->tape) {
        const size_t panel = static_cast<size_t>(op.k) * BP_PANEL * (model->dtype == BP_F32 ? 4 : 2);
        if (op.kind == BP_GEMM && op.format != BP_PLAIN) bytes = std::max(bytes, panel);
    }
    bytes = (bytes + 4095) / 4096 * 4096;
    for (int t = 0; t < runner->pool->num_threads(); ++t) {
        runner->scratch[t] = static_cast<char*>(std::aligned_alloc(4096, bytes));
        std::memset(runner->scratch[t], 0, bytes);
    }
    return runner;
}

void bp_program_run(void* program, const bp_step* step) {
    Runner* runner = static_cast<Runner*>(program);
    runner->step = *step;
    runner->plan_attention();
    runner->pool->run(Runner::run_tape, runner);
}

void bp_program_profile(void* program, int32_t enable) { static_cast<Runner*>(program)->profiling = enable != 0; }

void bp_program_times(void* program, double* seconds, int32_t reset) {
    Runner* runner = static_cast<Runner*>(program);
    std::copy(runner->seconds.begin(), runner->seconds.end(), seconds);
    if (reset) std::fill(runner->seconds.begin(), runner->seconds.end(), 0.0);
}

void bp_program_destroy(void* program) {
    Runner* runner = static_cast<Runner*>(program);
    const int threads = runner->pool->num_threads();
    delete runner->pool;
    for (int t = 0; t < threads; ++t) std::free(runner->scratch[t]);
    delete runner;
}
}
