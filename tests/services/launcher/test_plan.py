"""What `biphase serve` decides to run. Pure data, no processes."""

from __future__ import annotations

import sys

import pytest

from biphase.errors import ConfigError
from services.launcher.child import ChildSpec
from services.launcher.plan import children, flag_text
from services.launcher.serve import parse_settings
from services.launcher.settings import SERVE_FLAGS


def planned(*argv: str, **environ: str) -> dict[str, ChildSpec]:
    settings = parse_settings(argv, environ)
    specs = children(
        settings,
        redis_url="unix:///run/v.sock",
        num_threads=4,
        environ={"PATH": "/bin", **environ},
    )
    return {spec.name: spec for spec in specs}


def flags_of(spec: ChildSpec) -> dict[str, str]:
    """Flag -> value of what follows `python -m services.X`."""
    rest = spec.argv[3:]
    return {name.removeprefix("--"): value for name, value in zip(rest[::2], rest[1::2], strict=True)}


def test_by_default_one_of_each() -> None:
    specs = planned()
    assert specs.keys() == {"kvstore-0", "prefill-0", "decode-0", "gateway-0"}
    for name, spec in specs.items():
        assert spec.argv[:3] == (sys.executable, "-m", f"services.{name.partition('-')[0]}")
        assert flags_of(spec)["node-id"] == name


def test_as_many_workers_as_asked_for() -> None:
    assert planned("--prefill", "2", "--decode", "3", "--kvstore", "false").keys() == {
        "prefill-0", "prefill-1", "decode-0", "decode-1", "decode-2", "gateway-0",
    }  # fmt: skip


def test_aggregated_mode_has_no_prefill_worker_and_no_niceness() -> None:
    specs = planned("--prefill", "0")
    assert "prefill-0" not in specs
    assert "nice" not in flags_of(specs["decode-0"])


def test_prefill_yields_to_decode_unless_told_otherwise() -> None:
    specs = planned()
    assert flags_of(specs["prefill-0"])["nice"] == "9"
    assert "nice" not in flags_of(specs["decode-0"])
    specs = planned("--nice", "5")
    assert flags_of(specs["prefill-0"])["nice"] == flags_of(specs["decode-0"])["nice"] == "5"


def test_only_the_gateway_listens_where_the_user_says() -> None:
    specs = planned("--host", "0.0.0.0", "--port", "9000")
    assert flags_of(specs["gateway-0"]).items() >= {("host", "0.0.0.0"), ("port", "9000")}
    for name in ("kvstore-0", "prefill-0", "decode-0"):
        assert not flags_of(specs[name]).keys() & {"host", "port"}


def test_engine_flags_reach_the_workers_only() -> None:
    specs = planned("--block-size", "32", "--enable-prefix-caching", "false", "--kv-cache-bytes", "64MiB")
    for name in ("prefill-0", "decode-0"):
        given = flags_of(specs[name])
        assert (given["block-size"], given["enable-prefix-caching"], given["kv-cache-bytes"]) == (
            "32",
            "false",
            "67108864",
        )
    assert "block-size" not in flags_of(specs["gateway-0"])


def test_the_model_reaches_workers_and_gateway() -> None:
    specs = planned("some/model", "--served-model-name", "a,b")
    for name in ("prefill-0", "decode-0", "gateway-0"):
        assert flags_of(specs[name]).items() >= {("model", "some/model"), ("served-model-name", "a,b")}
    assert "model" not in flags_of(specs["kvstore-0"])


def test_keys_and_limits_reach_the_gateway_only() -> None:
    given = {"api-key-file": "/run/keys", "requests-per-minute": "5", "tokens-per-minute": "900"}
    specs = planned(*(part for name, value in given.items() for part in (f"--{name}", value)))
    for name, spec in specs.items():
        assert (
            flags_of(spec).items() >= given.items() if name == "gateway-0" else not flags_of(spec).keys() & given.keys()
        )


def test_secrets_travel_in_the_environment_only() -> None:
    specs = planned("--api-key", "sesame")
    assert specs["gateway-0"].environ["BIPHASE_API_KEY"] == "sesame"
    assert "BIPHASE_API_KEY" not in specs["decode-0"].environ
    for spec in specs.values():
        assert spec.environ["BIPHASE_REDIS_URL"] == "unix:///run/v.sock"
        assert not any("sesame" in text or "unix:" in text for text in spec.argv)


def test_variables_meant_for_serve_do_not_reach_the_children() -> None:
    specs = planned(BIPHASE_PORT="9000", BIPHASE_API_KEY="sesame", BIPHASE_SOMETHING_OF_THE_STORE="1", HF_TOKEN="t")
    assert flags_of(specs["gateway-0"])["port"] == "9000"
    for name, spec in specs.items():
        assert "BIPHASE_PORT" not in spec.environ
        assert ("BIPHASE_API_KEY" in spec.environ) == (name == "gateway-0")
        assert spec.environ["BIPHASE_SOMETHING_OF_THE_STORE"] == "1"
        assert spec.environ["HF_TOKEN"] == "t"


def test_threads_wait_passively_and_are_counted_for_workers() -> None:
    specs = planned(OMP_NUM_THREADS="7", OMP_WAIT_POLICY="ACTIVE")
    assert specs["decode-0"].environ["OMP_NUM_THREADS"] == "4"
    assert specs["gateway-0"].environ["OMP_NUM_THREADS"] == "1"
    assert all(spec.environ["OMP_WAIT_POLICY"] == "PASSIVE" for spec in specs.values())


def test_further_flags_of_a_role_come_last() -> None:
    assert planned("--decode-args", "--max-num-seqs 8 --x 'a b'")["decode-0"].argv[-4:] == (
        "--max-num-seqs",
        "8",
        "--x",
        "a b",
    )


def test_the_gateway_starts_last_and_ends_first_and_the_store_ends_last() -> None:
    specs = planned()
    assert max(specs.values(), key=lambda spec: spec.start_stage).name == "gateway-0"
    by_end = [spec.name for spec in sorted(specs.values(), key=lambda spec: spec.stop_stage)]
    assert (by_end[0], by_end[-1]) == ("gateway-0", "kvstore-0")


def test_every_default_survives_the_way_through_text() -> None:
    for flag in SERVE_FLAGS:
        if isinstance(flag.default, (bool, int, float)) and not flag.many:
            assert flag.parse(flag_text(flag.default)) == flag.default


def test_settings_that_cannot_be_used_are_refused() -> None:
    with pytest.raises(ConfigError, match="--log-format: 'xml' is not one of text, json"):
        parse_settings(["--log-format", "xml"], {})
