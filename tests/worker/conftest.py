from __future__ import annotations

from pathlib import Path

import pytest

from tests.tiny_models import save_tiny


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("llama", tmp_path_factory.mktemp("tiny-llama"))


@pytest.fixture(scope="session")
def tiny_qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("qwen2", tmp_path_factory.mktemp("tiny-qwen"))
