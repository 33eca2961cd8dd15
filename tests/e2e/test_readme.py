"""The README's first requests, as they stand there, against a running stack."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.stack import Stack, running_stack

README = Path(__file__).parent.parent.parent / "README.md"

pytestmark = [pytest.mark.e2e]


@pytest.fixture(scope="module")
def readme_stack() -> Iterator[Stack]:
    with running_stack("--kv-cache-bytes", "256MiB") as stack:
        yield stack


def code(language: str, containing: str, stack: Stack) -> str:
    """The README's code block with that text, for the stack's port."""
    blocks = re.findall(rf"```{language}\n(.*?)```", README.read_text(), re.DOTALL)
    (block,) = [block for block in blocks if containing in block]
    return str(block).replace("http://127.0.0.1:8000", stack.base_url)


def output_of(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout


def test_the_first_curl(readme_stack: Stack) -> None:
    answer = output_of("sh", "-ec", code("sh", "curl", readme_stack))
    assert '"role":"assistant"' in answer
    assert "The capital of France is Paris." in answer
    assert '"finish_reason":"stop"' in answer


def test_the_first_call_with_the_openai_sdk(readme_stack: Stack) -> None:
    assert output_of(sys.executable, "-c", code("python", "OpenAI", readme_stack)) == "The capital of France is Paris."


def test_status_shows_how_they_went(readme_stack: Stack) -> None:
    shown = output_of(sys.executable, "-m", "services.launcher.cli", "status", "--url", readme_stack.base_url)
    assert re.search(r"^prefill-0 +prefill +ready", shown, re.MULTILINE)
    assert re.search(r"^chatcmpl-\S+ +(remote|local)", shown, re.MULTILINE)
