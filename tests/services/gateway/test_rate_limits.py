"""Rate limits of API keys: buckets here and in Redis, shared by gateways, open when Redis is away."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from biphase.errors import ConfigError
from biphase.index.connection import connect
from biphase.index.embedded import EmbeddedValkey
from services.gateway.key_file import KeyGrant, digest_of, parse_key_file
from services.gateway.rate_limits import RateLimitedError, RateLimits
from tests.fakes import FakeDecode
from tests.services.gateway.conftest import StartGateway

Says = Callable[..., FakeDecode]


@pytest.fixture(scope="module")
def limiting_valkey() -> Iterator[EmbeddedValkey]:
    with EmbeddedValkey() as server:
        yield server


def grant_of(name: str, requests: int = 0, tokens: int = 0) -> KeyGrant:
    return KeyGrant(digest_of(name), requests_per_minute=requests, tokens_per_minute=tokens)


async def test_buckets_fill_evenly_and_may_go_into_debt() -> None:
    now = [100.0]
    limits = RateLimits(None, "c", clock=lambda: now[0])
    grant = grant_of("a", requests=3, tokens=60)
    for left in (2, 1, 0):
        state = await limits.take(grant, requests=1)
        assert state is not None and state.headers()["x-ratelimit-remaining-requests"] == str(left)
    with pytest.raises(RateLimitedError) as refused:
        await limits.take(grant, requests=1)
    assert refused.value.retry_after_seconds == pytest.approx(20) and "3 requests per minute" in refused.value.message
    now[0] += 20.1
    assert await limits.take(grant, requests=1)
    # A prompt larger than the limit passes when the bucket is full, and is waited for after that.
    assert await limits.take(grant, tokens=90)
    with pytest.raises(RateLimitedError) as refused:
        await limits.take(grant, tokens=10)
    assert refused.value.retry_after_seconds == pytest.approx(40)
    await limits.debit(grant, 20)
    now[0] += 59.9
    with pytest.raises(RateLimitedError):
        await limits.take(grant, tokens=10)
    now[0] += 0.2
    assert await limits.take(grant, tokens=10)
    assert await limits.take(grant_of("b"), requests=1, tokens=10**9) is None


async def test_redis_and_memory_count_alike_and_gateways_share(limiting_valkey: EmbeddedValkey) -> None:
    clients = [connect(limiting_valkey.url) for _ in range(2)]
    first, second = (RateLimits(client, "shared") for client in clients)
    grant = grant_of("shared", requests=4, tokens=1000)
    passed = 0
    for limits in (first, second) * 4:
        try:
            passed += await limits.take(grant, requests=1) is not None
        except RateLimitedError as error:
            assert 0 < error.retry_after_seconds <= 15
    assert passed == 4
    state = await first.take(grant, tokens=300)
    assert state is not None and 690 <= state.tokens < 702
    await second.debit(grant, 900)
    with pytest.raises(RateLimitedError) as refused:
        await first.take(grant, tokens=100)
    assert 15 < refused.value.retry_after_seconds < 20
    for client in clients:
        await client.aclose()


async def test_everybody_passes_while_redis_is_away(tmp_path: Path) -> None:
    skipped: list[int] = []
    now = [0.0]
    client = connect(f"unix://{tmp_path}/none.sock")
    limits = RateLimits(client, "c", on_failure=lambda: skipped.append(1), clock=lambda: now[0])
    for _ in range(5):
        assert await limits.take(grant_of("a", requests=1), requests=1) is None
    assert len(skipped) == 5
    await client.aclose()


def test_key_files() -> None:
    text = "# keys\n\nplain\n  k2 name=alice requests-per-minute=5 tokens-per-minute=7 cache-salt=s\n"
    text += "k3 tokens-per-minute=0\n"
    plain, alice, free = parse_key_file(text, grant_of("", requests=1, tokens=2))
    assert (plain.requests_per_minute, plain.tokens_per_minute, plain.cache_salt) == (1, 2, "")
    assert plain.digest == digest_of("plain")
    assert (alice.name, alice.requests_per_minute, alice.tokens_per_minute, alice.cache_salt) == ("alice", 5, 7, "s")
    assert free.tokens_per_minute == 0
    for line in (
        "secret x=1",
        "secret requests-per-minute=-1",
        "secret name=",
        "secret cache-salt",
        "secret tokens-per-minute=a",
    ):
        with pytest.raises(ConfigError) as refused:
            parse_key_file(f"ok\n{line}", grant_of(""))
        assert "line 2" in refused.value.message and "secret" not in refused.value.message


async def test_limits_and_salts_over_http(start_gateway: StartGateway, says: Says, tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("a requests-per-minute=2 cache-salt=sa\nb tokens-per-minute=50\nc\n")
    running = await start_gateway(says(), api_key_file=str(path), requests_per_minute=100)
    headers = {key: {"Authorization": f"Bearer {key}"} for key in "abc"}
    body = {"model": "smol", "prompt": "The sky is", "max_tokens": 4}

    async def send(key: str, **fields: object) -> tuple[int, dict[str, str]]:
        answer = await running.client.post("/v1/completions", json=body | fields, headers=headers[key])
        return answer.status_code, dict(answer.headers)

    status, told = await send("a", cache_salt="mine")
    assert status == 200 and told["x-ratelimit-limit-requests"] == "2" and told["x-ratelimit-remaining-requests"] == "1"
    assert running.workers[0].seen[-1].request.cache_salt == "sa/mine"
    status, _ = await send("a", prompt="")
    assert status == 400
    status, told = await send("a")
    assert status == 429 and 1 <= int(told["retry-after"]) <= 30 and told["x-ratelimit-remaining-requests"] == "0"
    # Other keys, other buckets; what was generated counts when it is done.
    status, told = await send("b", max_tokens=60, ignore_eos=True, stream=True)
    assert status == 200 and told["x-ratelimit-limit-tokens"] == "50"
    assert running.workers[0].seen[-1].request.cache_salt == ""
    await asyncio.sleep(0.05)
    status, told = await send("b")
    assert status == 429 and told["x-ratelimit-remaining-tokens"] == "0" and int(told["retry-after"]) >= 10
    assert (await send("c"))[0] == 200
    assert (await running.client.get("/v1/models", headers=headers["a"])).status_code == 200


async def test_a_gateway_with_redis_limits_and_stores(
    start_gateway: StartGateway, says: Says, limiting_valkey: EmbeddedValkey
) -> None:
    worker = await says().start()
    gateways = [
        await start_gateway(
            worker, redis_url=limiting_valkey.url, decode_nodes=(worker.address,), requests_per_minute=2
        )
        for _ in range(2)
    ]
    first, second = gateways
    body = {"input": "hi", "max_output_tokens": 4}
    kept = (await first.client.post("/v1/responses", json=body)).json()
    assert (await second.client.get(f"/v1/responses/{kept['id']}")).json() == kept
    again = await second.client.post("/v1/responses", json=body | {"previous_response_id": kept["id"]})
    assert again.status_code == 200
    assert (await first.client.post("/v1/responses", json=body)).status_code == 429
    limiting_valkey.stop()
    for _ in range(3):
        answer = await first.client.post("/v1/responses", json=body)
        assert answer.status_code == 200
        # Kept here meanwhile.
        assert (await first.client.get(f"/v1/responses/{answer.json()['id']}")).status_code == 200
    assert "biphase:rate_limit_skipped_total 3.0" in (await first.client.get("/metrics")).text
