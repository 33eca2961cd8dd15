"""What must not share a KV block does not, with all of it in one cluster: workers, a block store, Valkey, all real.

Two workers of each kind. What one of them computed has to be found by the other, by way of the index, and by nobody
else: the same prompt is computed anew by every other kind and under every other salt. Shown by what the workers count,
by what the store counts, by the names of the blocks, and by the time that a prompt takes.
"""

from __future__ import annotations

import json
import random
import shutil
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from biphase.cache.hashing import extend_block_hashes
from biphase.index.embedded import EmbeddedValkey
from biphase.request import BlockHash
from biphase.worker import prefixes
from biphase.worker.worker import Worker
from tests.services.kvstore.conftest import RunningStore, StartStore, eventually
from tests.tiny_models import save_tiny
from tests.worker.pair import Answer, Client, running_worker

DRAW = random.Random(1)
PROMPT = [3 + DRAW.randrange(200) for _ in range(100)]
# The last token is always computed, for its logits.
SHARED = 96


@dataclass
class Kind:
    """Two workers that may share blocks with each other."""

    first: Worker
    second: Worker
    clients: tuple[Client, Client]


StartKind = Callable[..., Awaitable[Kind]]


@pytest.fixture
async def isolated_store(start_store: StartStore, store_valkey: EmbeddedValkey) -> RunningStore:
    store: RunningStore = await start_store(
        "--redis-url", store_valkey.url, "--capacity", "64MiB", "--max-namespaces", "8"
    )
    return store


@pytest.fixture
async def start_kind(
    isolated_store: RunningStore, store_valkey: EmbeddedValkey, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[StartKind]:
    """`await start_kind(model, name, *flags)`: two decode workers that prefill themselves."""
    # On a machine that is busy with other things a worker would rather compute than wait; here it has to read.
    monkeypatch.setattr(prefixes, "_LEASE_CALL_SECONDS", 30.0)
    async with AsyncExitStack() as stack:

        async def start(model: Path, name: str, *flags: str) -> Kind:
            workers, clients = [], []
            for place in range(2):
                node_id = f"{name}-{place}"
                running = running_worker("decode", model, node_id, "--redis-url", store_valkey.url, *flags)
                workers.append(await stack.enter_async_context(running))
                clients.append(Client(workers[-1]))
                stack.push_async_callback(clients[-1].close)
            # One that looked at the registry just before another's first heartbeat does not know it for a while.
            node_ids = [worker.node_id for worker in workers]
            for worker in workers:
                cluster = worker.cluster
                await eventually(lambda cluster=cluster: bool(cluster.stores()) and all(map(cluster.node, node_ids)))  # type: ignore[misc]
            return Kind(workers[0], workers[1], (clients[0], clients[1]))

        yield start


def num_found(answer: Answer) -> int:
    """Prompt tokens that were not computed for this answer."""
    report = answer.report
    assert report.num_cached_tokens + report.num_external_tokens + report.num_computed_tokens == len(PROMPT)
    return report.num_cached_tokens + report.num_external_tokens


def chain_of(worker: Worker, tokens: Sequence[int], cache_salt: str = "") -> list[BlockHash]:
    hashes: list[BlockHash] = []
    extend_block_hashes(hashes, worker.root_hash(cache_salt), tokens, worker.settings.block_size)
    return hashes


async def found_by_its_like(kind: Kind, cache_salt: str = "") -> None:
    """The first worker has to compute the prompt, and the second one reads it, to the same end."""
    cold = await kind.clients[0].generate(PROMPT, cache_salt=cache_salt)
    assert num_found(cold) == 0, "found what only others had computed"
    wanted = chain_of(kind.second, PROMPT, cache_salt)[: SHARED // kind.second.settings.block_size]
    await eventually(
        lambda: sum(span.stop - span.start for span in kind.second.cluster.view.plan(wanted)) == len(wanted)
    )
    shared = await kind.clients[1].generate(PROMPT, cache_salt=cache_salt)
    assert (num_found(shared), shared.report.num_external_tokens) == (SHARED, SHARED)
    assert shared.token_ids == cold.token_ids


def another_weight(model: Path, folder: Path) -> Path:
    """The same model but for one number."""
    shutil.copytree(model, folder)
    weights = load_file(folder / "model.safetensors")
    name = next(name for name in sorted(weights) if "k_proj" in name)
    weights[name][0, 0] += 1.0
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def another_rope(model: Path, folder: Path) -> Path:
    shutil.copytree(model, folder)
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"]["rope_theta"] *= 2
    (folder / "config.json").write_text(json.dumps(config))
    return folder


async def test_models_dtypes_and_quantisations_share_nothing(
    start_kind: StartKind, isolated_store: RunningStore, tmp_path: Path
) -> None:
    model = save_tiny("llama", tmp_path / "model")
    kinds = {
        "float32": await start_kind(model, "float32"),
        "bfloat16": await start_kind(model, "bfloat16", "--dtype", "bfloat16"),
        "int8": await start_kind(model, "int8", "--dtype", "bfloat16", "--quantization", "int8"),
        "fp8 keys": await start_kind(model, "bfloat16-fp8", "--dtype", "bfloat16", "--kv-cache-dtype", "fp8"),
        "fp8": await start_kind(model, "fp8", "--kv-cache-dtype", "fp8"),
        "weight": await start_kind(another_weight(model, tmp_path / "weight"), "weight"),
        "rope": await start_kind(another_rope(model, tmp_path / "rope"), "rope"),
        "blocks": await start_kind(model, "blocks", "--block-size", "8"),
    }
    for kind in kinds.values():
        await found_by_its_like(kind)
    held = [set(kind.first.pool.committed_hashes()) for kind in kinds.values()]
    assert sum(map(len, held)) == len(set().union(*held))
    counters = await isolated_store.counters()
    assert counters["num_namespaces"] == len(kinds)
    for kind in kinds.values():
        # Every one of them still has only its own.
        own = {kind.first.node_id, kind.second.node_id, isolated_store.process.node_id}
        assert own >= set(kind.first.cluster.view.holders())


async def test_salts_share_nothing(start_kind: StartKind, isolated_store: RunningStore, tmp_path: Path) -> None:
    kind = await start_kind(save_tiny("llama", tmp_path / "model"), "worker")
    for salt in ("", "a", "b", "ab", "a\0", "A"):
        await found_by_its_like(kind, salt)
    # Tenants with a salt, as the store tells them apart.
    assert (await isolated_store.counters())["num_tenants"] == 5


async def test_time_does_not_tell_what_another_salt_has_cached(start_kind: StartKind, tmp_path: Path) -> None:
    """A prompt that another salt has cached takes as long as one that nobody has, at its own worker and elsewhere."""
    wide = {"hidden_size": 384, "intermediate_size": 768, "num_hidden_layers": 4, "head_dim": 64}
    kind = await start_kind(save_tiny("llama", tmp_path / "model", **wide), "worker", "--max-num-batched-tokens", "512")

    async def seconds(prompt: list[int], client: Client, cache_salt: str) -> float:
        start = time.perf_counter()
        await client.generate(prompt, cache_salt=cache_salt, max_tokens=1)
        return time.perf_counter() - start

    times: dict[str, list[float]] = {"cold": [], "own": [], "others": [], "others elsewhere": []}
    for number in range(5):
        prompt = [3 + DRAW.randrange(200) for _ in range(500)]
        times["cold"].append(await seconds(prompt, kind.clients[0], "victim"))
        times["own"].append(await seconds(prompt, kind.clients[0], "victim"))
        times["others"].append(await seconds(prompt, kind.clients[0], "attacker"))
        times["others elsewhere"].append(await seconds(prompt, kind.clients[1], f"attacker {number}"))
    medians = {name: statistics.median(values) for name, values in times.items()}
    assert medians["own"] < 0.5 * medians["cold"], medians
    for name in ("others", "others elsewhere"):
        assert medians[name] > 0.5 * medians["cold"], medians
