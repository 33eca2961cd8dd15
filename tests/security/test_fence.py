"""Nobody opens a worker or a store to others by accident; what a setting says of token and certificates is checked
before anything is opened, and is said without the secret."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from biphase.errors import ConfigError
from biphase.rpc.trust import OPEN, Trust, is_loopback, require_fence, trust_of
from biphase.settings import TRUST_FLAGS, TrustSettings, parse_flags
from services.launcher.plan import children
from services.launcher.serve import parse_settings
from tests.security.authority import Authority
from tests.security.conftest import TOKEN


def parsed(*argv: str, **environ: str) -> TrustSettings:
    return parse_flags("test", "", TRUST_FLAGS, TrustSettings, argv, environ)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "[::1]", "localhost"])
def test_loopback_needs_no_fence(host: str) -> None:
    assert is_loopback(host)
    require_fence(OPEN, host, insecure=False)


@pytest.mark.parametrize(
    "host", ["0.0.0.0", "::", "10.0.0.1", "fd00::1", "worker.example.com", "localhost.example.com"]
)
def test_listening_for_others_needs_a_fence(host: str, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ConfigError, match="BIPHASE_SERVICE_TOKEN"):
        require_fence(OPEN, host, insecure=False)
    require_fence(trust_of(parsed("--service-token", TOKEN)), host, insecure=False)
    assert not caplog.records
    require_fence(OPEN, host, insecure=True)
    assert [record.getMessage() for record in caplog.records] == ["listening_insecurely"]


@pytest.mark.parametrize("role", ["decode", "kvstore"])
def test_a_service_without_a_fence_opens_nothing(role: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", f"services.{role}", "--host", "0.0.0.0"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "neither a service token nor TLS" in done.stderr


def test_a_token_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text(TOKEN + "\n")
    from_file, from_flag = (
        trust_of(parsed("--service-token-file", str(path))),
        trust_of(parsed("--service-token", TOKEN)),
    )
    assert from_file.token is not None and from_flag.token is not None
    assert from_file.token.mac(b"x") == from_flag.token.mac(b"x")
    for text, reason in [("", "is empty"), ("short\n", "too short")]:
        path.write_text(text)
        with pytest.raises(ConfigError, match=reason):
            trust_of(parsed("--service-token-file", str(path)))
    with pytest.raises(ConfigError, match="cannot read"):
        trust_of(parsed("--service-token-file", str(tmp_path / "none")))
    with pytest.raises(ConfigError, match="give one") as caught:
        trust_of(parsed("--service-token-file", str(path), BIPHASE_SERVICE_TOKEN=TOKEN))
    assert TOKEN not in str(caught.value)


def test_certificates_that_cannot_be_used(tmp_path: Path, authority: Authority, strangers: Authority) -> None:
    good, other = authority.issue("good"), strangers.issue("other")
    nonsense = tmp_path / "nonsense"
    nonsense.write_text("nothing")
    assert trust_of(parsed(*good.flags(authority.ca))).tls is not None
    for flags, reason in [
        (("--tls-cert", good.cert), "--tls-key, --tls-ca is not given"),
        (("--tls-cert", good.cert, "--tls-key", other.key, "--tls-ca", authority.ca), "no usable pair"),
        (("--tls-cert", str(nonsense), "--tls-key", good.key, "--tls-ca", authority.ca), "no usable pair"),
        (("--tls-cert", good.cert, "--tls-key", good.key, "--tls-ca", str(nonsense)), "--tls-ca"),
        (("--tls-cert", good.cert, "--tls-key", good.key, "--tls-ca", str(tmp_path / "none")), "cannot read"),
    ]:
        with pytest.raises(ConfigError, match=reason):
            trust_of(parsed(*flags))


def test_secrets_are_in_no_repr(authority: Authority) -> None:
    trust = trust_of(parsed("--service-token", TOKEN, *authority.issue("shown").flags(authority.ca)))
    assert isinstance(trust, Trust)
    assert TOKEN not in repr(trust) and "PRIVATE KEY" not in repr(trust)


def test_children_get_secrets_by_environment_only() -> None:
    settings = parse_settings(["--service-token", TOKEN], {})
    for spec in children(settings, redis_url="unix:///run/v.sock", num_threads=1, environ={}):
        assert TOKEN not in " ".join(spec.argv)
        assert spec.environ["BIPHASE_SERVICE_TOKEN"] == TOKEN
