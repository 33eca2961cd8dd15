"""All speed figures of one machine in one run, each beside its floor and its goal. `make bench`, or

    python -m tests.bench.figures [--peers VENV ...] [--only steps|http|peers ...] [--rounds 1] [--json FILE]
                                  [-- flags of biphase serve]

Three tables. Steps: the compiled step by itself, on the bundled model. HTTP: what clients of the whole stack feel,
aggregated and disaggregated, at 1, 8 and 32 streams of 128 tokens in and 64 out, 16 streams after 1,024 tokens, prompts
of 1,152 tokens, and such prompts 4 at once with their first 1,024 tokens in common. Peers: the same load on vLLM,
llama.cpp and transformers, where a virtual environment named by --peers has them; a ratio says how many times as fast
aggregated biphase is.

The floor of a row is what moving its bytes, or computing its operations, takes at the rates that this run measured.
With --rounds each HTTP load is repeated, all servers in turn, and the median counts.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from biphase.model.loader import LoadedModel, load_model
from biphase.model.source import resolve_model
from tests.bench import bench_quantised, peers, serving
from tests.bench.bench_quantised import Case
from tests.bench.machine import Machine, best_and_median, measure
from tests.e2e.stack import running_stack

PROMPT, OUTPUT, LONG_PROMPT = 128, 64, 1152
STREAMS = {1: 8, 8: 32, 32: 64}
LONG_REQUESTS = 8
# Streams that decode after a long context; requests of which all but the last 128 tokens are shared.
DEEP, DEEP_STREAMS = 1024, 16
SHARED, SHARED_REQUESTS, SHARED_STREAMS = 1024, 24, 4
# Goals through HTTP, aggregated, bf16, on the two cores they were set for; milliseconds or tokens/s.
GOALS = {"itl 1": 9.0, "itl 8": 14.0, "tokens 32": 750.0, "prefill": 2400.0, "deep": 30.0, "shared": 8000.0}
_DEEP_COLUMN, _SHARED_COLUMN = f"{DEEP_STREAMS} x {DEEP:,}: ITL ms", "shared prefix: prompt tok/s"
CASES = {
    "decode 1": Case(1, 1, 160),
    "decode 8": Case(8, 1, 160),
    "decode 32": Case(32, 1, 160),
    "decode 16 x 1,024": Case(16, 1, 1024),
    "decode 1 x 4,096": Case(1, 1, 4096),
    "prefill 512": Case(1, 512, 0),
    "prefill 512 after 512": Case(1, 512, 512),
}


@dataclass(frozen=True)
class Work:
    """What a step must move and compute, for a model whose matrices take `weight_bytes`."""

    num_bytes: float
    flop: float


def work_of(model: LoadedModel, case: Case) -> Work:
    spec = model.spec
    matrices = {name: w for name, w in model.weights.items() if len(w.shape) == 2}
    elements = {name: w.shape[0] * w.shape[1] for name, w in matrices.items()}
    head = elements["embed" if spec.tie_word_embeddings else "lm_head"]
    # The embedding table is read by rows only, unless it is the head too.
    layers = sum(count for name, count in elements.items() if name not in ("embed", "lm_head"))
    weight_bytes = model.num_weight_bytes * (layers + head) / sum(elements.values())
    tokens, length = case.sequences * case.queries, case.context + case.queries
    pairs = case.sequences * sum(range(case.context + 1, length + 1))
    attention = 4 * pairs * spec.num_heads * spec.head_dim * spec.num_layers
    kv_bytes = case.sequences * length * spec.kv_elements_per_token * model.dtype.itemsize
    return Work(weight_bytes + kv_bytes, 2 * layers * tokens + 2 * head * case.sequences + attention)


def steps(machine: Machine, seconds: float) -> list[dict[str, object]]:
    """The compiled step in each way of holding weights, interleaved by case."""
    source = resolve_model("")
    programs = []
    for mode in ("bf16", "gguf, decoded", "gguf"):
        quantization, integer_dot = bench_quantised.MODES[mode]
        model = load_model(source, "bfloat16", quantization=quantization)
        programs.append((mode, model, bench_quantised.program_of(model, integer_dot, machine.num_cores)))
    tokens = torch.randint(1000, (bench_quantised.MAX_TOKENS,), generator=torch.Generator().manual_seed(1))
    rows: list[dict[str, object]] = []
    for name, case in CASES.items():
        batch = bench_quantised.batch_of(tokens, case)
        for mode, model, program in programs:
            work = work_of(model, case)
            floor = machine.floor_seconds(work.num_bytes, work.flop)
            best, median = best_and_median(lambda program=program, batch=batch: program(batch), seconds)  # type: ignore[misc]
            rows.append({
                "step": name, "weights": mode, "ms best": round(best * 1e3, 2), "ms median": round(median * 1e3, 2),
                "floor ms": round(floor * 1e3, 2), "times the floor": round(median / floor, 2),
                "tokens/s": round(case.sequences * case.queries / median),
                "GB/s": round(work.num_bytes / median / 1e9, 1), "GFLOP/s": round(work.flop / median / 1e9),
            })  # fmt: skip
    for _, _, program in programs:
        program.close()
    return rows


def http_loads(url: str, model: str) -> dict[str, dict[str, float]]:
    """Figures of one server by load: "1", "8", "32" streams, "prefill", "deep" and "shared"."""

    def load(
        concurrency: int, requests: int, prompt: int, output: int, seed: int, shared: int = 0
    ) -> dict[str, object]:
        given = serving.Load(model, requests, concurrency, prompt, output, shared, seed)
        found = asyncio.run(serving.run(url, given))
        if found["errors"]:
            print(f"{url}: {found['errors']} of {requests} requests failed: {found['first_error']}", file=sys.stderr)
        return found

    load(1, 2, PROMPT, 8, 1)  # Warm: first uses of memory and code are not what is asked.
    found: dict[str, dict[str, float]] = {}
    for concurrency, requests in STREAMS.items():
        of = load(concurrency, requests, PROMPT, OUTPUT, 10 + concurrency)
        itl, ttft = of["itl_ms"], of["ttft_ms"]
        assert isinstance(itl, dict) and isinstance(ttft, dict)
        tokens = of["output_tokens_per_second"]
        assert isinstance(tokens, float)
        found[str(concurrency)] = {
            "itl_ms": itl.get("p50", 0.0), "itl_p99_ms": itl.get("p99", 0.0), "ttft_ms": ttft.get("p50", 0.0),
            "tokens": tokens,
        }  # fmt: skip
    of = load(1, LONG_REQUESTS, LONG_PROMPT, 1, 99)
    ttft, took = of["ttft_ms"], of["seconds"]
    assert isinstance(ttft, dict) and isinstance(took, float)
    found["prefill"] = {"ttft_ms": ttft.get("p50", 0.0), "prompt_tokens": LONG_REQUESTS * LONG_PROMPT / took}
    itl = load(DEEP_STREAMS, DEEP_STREAMS, DEEP, OUTPUT, 98)["itl_ms"]
    assert isinstance(itl, dict)
    found["deep"] = {"itl_ms": itl.get("p50", 0.0)}
    took = load(SHARED_STREAMS, SHARED_REQUESTS, LONG_PROMPT, 16, 97, SHARED)["seconds"]
    assert isinstance(took, float)
    found["shared"] = {"prompt_tokens": SHARED_REQUESTS * LONG_PROMPT / took}
    return found


def median_of(rounds: Sequence[dict[str, dict[str, float]]]) -> dict[str, dict[str, float]]:
    return {
        load: {name: round(statistics.median(one[load][name] for one in rounds), 1) for name in figures}
        for load, figures in rounds[0].items()
    }


def http(
    found_peers: Sequence[peers.Peer], serve_flags: Sequence[str], num_rounds: int, with_ours: bool, num_cores: int
) -> dict[str, dict[str, dict[str, float]]]:
    """Figures of every server by name, their loads in turn, one server up at a time."""
    gguf = resolve_model("").path
    ours = {"aggregated": ("--prefill", "0"), "disaggregated": ()} if with_ours else {}
    rounds: dict[str, list[dict[str, dict[str, float]]]] = {}
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(peers.folder_of(gguf)) if found_peers else gguf
        for _ in range(num_rounds):
            for name, flags in ours.items():
                with running_stack(*flags, *serve_flags) as server:
                    model = asyncio.run(serving.served_model(server.base_url))
                    rounds.setdefault(f"biphase {name}", []).append(http_loads(server.base_url, model))
            for peer in found_peers:
                name = f"{peer.product} ({peer.kind} {peer.version})"
                try:
                    rounds.setdefault(name, []).append(_peer(peer, gguf, folder, num_cores))
                except RuntimeError as error:
                    print(error, file=sys.stderr)
    return {name: median_of(figures) for name, figures in rounds.items() if figures}


def _peer(peer: peers.Peer, gguf: Path, folder: Path, num_cores: int) -> dict[str, dict[str, float]]:
    if peer.kind == "transformers":
        return peers.transformers_figures(peer, folder, num_cores)
    with peers.running(peer, gguf, folder, num_cores) as url:
        return http_loads(url, asyncio.run(serving.served_model(url)))


def floor_row(machine: Machine) -> dict[str, object]:
    """What a step's bytes and operations take at least, of the bundled model as it is served; streams half way through
    their output, nothing else in the step."""
    model = load_model(resolve_model(""), "bfloat16", keep_blocks=True)

    def seconds(case: Case) -> float:
        work = work_of(model, case)
        return machine.floor_seconds(work.num_bytes, work.flop)

    row: dict[str, object] = {"server": "floor"}
    for streams in STREAMS:
        itl = seconds(Case(streams, 1, PROMPT + OUTPUT // 2))
        row |= {f"{streams}: ITL p50/p99 ms": f"{itl * 1e3:.1f}", f"{streams}: tok/s": round(streams / itl)}
    row["prefill tok/s"] = round(LONG_PROMPT / seconds(Case(1, LONG_PROMPT, 0)))
    row[_DEEP_COLUMN] = f"{seconds(Case(DEEP_STREAMS, 1, DEEP + OUTPUT // 2)) * 1e3:.1f}"
    return row


def http_rows(found: dict[str, dict[str, dict[str, float]]]) -> list[dict[str, object]]:
    """A row for each server; after ours, each peer's ratios: how many times as fast aggregated biphase is."""
    own = found.get("biphase aggregated")
    rows: list[dict[str, object]] = []
    for name, of in found.items():
        row: dict[str, object] = {"server": name}
        for streams in STREAMS:
            figures = of[str(streams)]
            row |= {
                f"{streams}: ITL p50/p99 ms": f"{figures['itl_ms']:.1f} / {figures['itl_p99_ms']:.1f}",
                f"{streams}: TTFT ms": round(figures["ttft_ms"]),
                f"{streams}: tok/s": round(figures["tokens"]),
            }
        row["prefill tok/s"] = round(of["prefill"]["prompt_tokens"])
        if "deep" in of:
            row[_DEEP_COLUMN] = f"{of['deep']['itl_ms']:.1f}"
            row[_SHARED_COLUMN] = round(of["shared"]["prompt_tokens"])
        rows.append(row)
        if own is not None and not name.startswith("biphase"):
            ratio: dict[str, object] = {"server": "  ratio"}
            for streams in STREAMS:
                figures, mine = of[str(streams)], own[str(streams)]
                ratio |= {
                    f"{streams}: ITL p50/p99 ms": f"{figures['itl_ms'] / mine['itl_ms']:.2f}",
                    f"{streams}: TTFT ms": f"{figures['ttft_ms'] / mine['ttft_ms']:.2f}",
                    f"{streams}: tok/s": f"{mine['tokens'] / figures['tokens']:.2f}",
                }
            ratio["prefill tok/s"] = f"{own['prefill']['prompt_tokens'] / of['prefill']['prompt_tokens']:.2f}"
            if "deep" in of:
                ratio[_DEEP_COLUMN] = f"{of['deep']['itl_ms'] / own['deep']['itl_ms']:.2f}"
                ratio[_SHARED_COLUMN] = f"{own['shared']['prompt_tokens'] / of['shared']['prompt_tokens']:.2f}"
            rows.append(ratio)
    if own is not None:
        rows.append({
            "server": "goal", "1: ITL p50/p99 ms": GOALS["itl 1"], "8: ITL p50/p99 ms": GOALS["itl 8"],
            "32: tok/s": GOALS["tokens 32"], "prefill tok/s": GOALS["prefill"], _DEEP_COLUMN: GOALS["deep"],
            _SHARED_COLUMN: GOALS["shared"],
        })  # fmt: skip
    return rows


def table(rows: Sequence[dict[str, object]]) -> str:
    """Rows as a Markdown table; the first row names the columns."""
    columns = list(rows[0])
    lines = [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    lines += [f"| {' | '.join(str(row.get(column, '')) for column in columns)} |" for row in rows]
    return "\n".join(lines)


def main() -> int:
    arguments = sys.argv[1:]
    at = arguments.index("--") if "--" in arguments else len(arguments)
    parser = argparse.ArgumentParser(description="All speed figures of one machine.")
    parser.add_argument("--peers", action="append", default=[], help="a virtual environment with peers; repeatable")
    parser.add_argument("--only", action="append", choices=("steps", "http", "peers"))
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=1.0, help="per step measured")
    parser.add_argument("--json", default="", help="write all figures here too")
    given = parser.parse_args(arguments[:at])
    parts = given.only or ["steps", "http", "peers"]
    machine = measure()
    print(f"{machine.processor}, {machine.num_cores} cores: reads {machine.read_bytes_per_second / 1e9:.1f} GB/s, "
          f"multiplies bfloat16 at {machine.matmul_flop_per_second / 1e9:.0f} GFLOP/s (torch, this run)\n")  # fmt: skip
    report: dict[str, object] = {"machine": asdict(machine)}
    if "steps" in parts:
        rows = steps(machine, given.seconds)
        report["steps"] = rows
        print(table(rows), end="\n\n", flush=True)
    if "http" in parts or "peers" in parts:
        found_peers = peers.find(given.peers) if "peers" in parts else []
        found = http(found_peers, arguments[at + 1 :], given.rounds, "http" in parts, machine.num_cores)
        report["http"] = found
        rows = http_rows(found)
        if rows:
            print(table([*rows, floor_row(machine)]), end="\n\n")
        absent = {"vLLM", "llama.cpp", "transformers"} - {peer.product for peer in found_peers}
        if absent and "peers" in parts:
            print(f"Not measured, as no --peers environment has them: {', '.join(sorted(absent))}.")
    if given.json:
        Path(given.json).write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
