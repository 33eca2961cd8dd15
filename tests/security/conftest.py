from __future__ import annotations

import pytest

from biphase.rpc.tls import Tls
from biphase.rpc.token import ServiceToken
from tests.security.authority import Authority

TOKEN = "a token that only this cluster's processes have"


@pytest.fixture
def token() -> ServiceToken:
    return ServiceToken(TOKEN)


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("pki") / "ours")


@pytest.fixture(scope="session")
def strangers(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """Another authority, which issues the same names."""
    return Authority(tmp_path_factory.mktemp("pki") / "theirs")


@pytest.fixture(scope="session")
def tls(authority: Authority) -> Tls:
    """Of a process of this cluster."""
    return authority.issue("worker").tls(authority.ca)
