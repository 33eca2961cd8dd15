from __future__ import annotations

import pytest

from biphase.model.source import resolve_model
from biphase.tokenizer.loader import LoadedTokenizer, load_tokenizer


@pytest.fixture(scope="session")
def bundled_tokenizer() -> LoadedTokenizer:
    return load_tokenizer(resolve_model(""))
