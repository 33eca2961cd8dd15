"""Real servers for the index's tests: the embedded Valkey, one per test where its life is the subject."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
from redis.asyncio import Redis

from biphase.index.connection import connect
from biphase.index.embedded import EmbeddedValkey


@pytest.fixture
def index_server() -> Iterator[EmbeddedValkey]:
    """A server of its own: the test may stop, restart or pause it."""
    with EmbeddedValkey() as server:
        yield server


@pytest.fixture
async def index_client(index_server: EmbeddedValkey) -> AsyncIterator[Redis]:
    client = connect(index_server.url, timeout_seconds=0.5)
    yield client
    await client.aclose()
