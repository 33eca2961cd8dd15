from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.stack import Stack, running_stack
from tests.telemetry.collector import Collector
from tests.tiny_models import save_tiny
from tests.tiny_tokenizer import MODEL_VOCAB_SIZE, save_tokenizer


@pytest.fixture(scope="session")
def collector() -> Iterator[Collector]:
    collector = Collector()
    yield collector
    collector.close()


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory, collector: Collector) -> Iterator[Stack]:
    """One of each service, with traces and JSON logs."""
    folder = tmp_path_factory.mktemp("model")
    model = save_tokenizer(save_tiny("llama", folder, vocab_size=MODEL_VOCAB_SIZE, max_position_embeddings=2048))
    flags: tuple[str, ...] = (
        "--served-model-name",
        "tiny",
        "--num-blocks",
        "256",
        "--log-format",
        "json",
        "--log-level",
        "debug",
    )
    # Whether a prompt is handed off shall not depend on how quick this machine is.
    flags = (*flags, "--decode-args=--max-slow-local-tokens 0")
    template = "{% for message in messages %}{{ message.content }}\n{% endfor %}"
    flags = (*flags, "--chat-template", template)
    environ = {"OTEL_BSP_SCHEDULE_DELAY": "100"}
    with running_stack(str(model), *flags, "--otlp-endpoint", collector.url, environ=environ) as stack:
        yield stack
