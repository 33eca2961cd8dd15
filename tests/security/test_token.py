"""The proof of the service token: good once, for one method, for a minute, and it gives nothing away."""

from __future__ import annotations

import pytest

from biphase.errors import ConfigError, UnauthorizedError
from biphase.rpc.token import MAX_SKEW_SECONDS, ProofChecker, ServiceToken
from tests.security.conftest import TOKEN

METHOD = "/biphase.rpc.v1.Node/Drain"


class Clock:
    def __init__(self) -> None:
        self.now = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def checker(token: ServiceToken, clock: Clock) -> ProofChecker:
    return ProofChecker(token, clock)


def test_a_proof_is_good_once(token: ServiceToken, clock: Clock, checker: ProofChecker) -> None:
    proof = token.prove_call(METHOD, clock.now)
    checker.check(METHOD, proof)
    with pytest.raises(UnauthorizedError, match="used before"):
        checker.check(METHOD, proof)
    checker.check(METHOD, token.prove_call(METHOD, clock.now))


def test_other_processes_do_not_know_that_a_proof_was_used(
    token: ServiceToken, clock: Clock, checker: ProofChecker
) -> None:
    # SECURITY.md says so: without TLS, who overhears a call can make it at another process, or at this one restarted.
    proof = token.prove_call(METHOD, clock.now)
    checker.check(METHOD, proof)
    other = ProofChecker(token, clock)
    other.check(METHOD, proof)
    with pytest.raises(UnauthorizedError):
        other.check(METHOD, proof)
    clock.now += MAX_SKEW_SECONDS + 1
    with pytest.raises(UnauthorizedError):
        ProofChecker(token, clock).check(METHOD, proof)


def test_a_proof_is_never_good_again(token: ServiceToken, clock: Clock, checker: ProofChecker) -> None:
    """Neither while its time lasts, however the memory is turned over meanwhile, nor after."""
    proof = token.prove_call(METHOD, clock.now + MAX_SKEW_SECONDS)
    checker.check(METHOD, proof)
    for _ in range(300):
        clock.now += 1.0
        checker.check(METHOD, token.prove_call(METHOD, clock.now))
        with pytest.raises(UnauthorizedError, match=r"used before|s old"):
            checker.check(METHOD, proof)


def test_what_is_remembered_is_forgotten(token: ServiceToken, clock: Clock, checker: ProofChecker) -> None:
    for _ in range(1000):
        clock.now += 1.0
        checker.check(METHOD, token.prove_call(METHOD, clock.now))
        assert len(checker._seen) + len(checker._seen_before) <= 4 * MAX_SKEW_SECONDS


@pytest.mark.parametrize("proof", [None, b"bytes"])
def test_no_proof(checker: ProofChecker, proof: bytes | None) -> None:
    with pytest.raises(UnauthorizedError, match=r"no proof.*--service-token"):
        checker.check(METHOD, proof)


@pytest.mark.parametrize(
    "change",
    [
        lambda proof: "",
        lambda proof: TOKEN,
        lambda proof: "..",
        lambda proof: "1.2.3.4",
        lambda proof: f"{'f' * 5000}.{'f' * 5000}.00",
        lambda proof: proof.replace(".", "."[:0], 1),
        lambda proof: proof[:-1] + ("0" if proof[-1] != "0" else "1"),
        lambda proof: "1" + proof,
        lambda proof: proof.partition(".")[0] + "." + "0" * 16 + "." + proof.rpartition(".")[2],
        lambda proof: proof + "é",
    ],
)
def test_a_false_proof(token: ServiceToken, clock: Clock, checker: ProofChecker, change: object) -> None:
    false = change(token.prove_call(METHOD, clock.now))  # type: ignore[operator]
    with pytest.raises(UnauthorizedError, match="false"):
        checker.check(METHOD, false)
    # Nobody without the token adds to what is remembered.
    assert not checker._seen


def test_the_proof_of_another_token(clock: Clock, checker: ProofChecker) -> None:
    other = ServiceToken("the token of another cluster")
    with pytest.raises(UnauthorizedError, match="false"):
        checker.check(METHOD, other.prove_call(METHOD, clock.now))


def test_the_proof_of_another_method(token: ServiceToken, clock: Clock, checker: ProofChecker) -> None:
    with pytest.raises(UnauthorizedError, match="false"):
        checker.check(METHOD, token.prove_call("/biphase.rpc.v1.Node/GetInfo", clock.now))


@pytest.mark.parametrize("seconds", [-MAX_SKEW_SECONDS - 2, MAX_SKEW_SECONDS + 2])
def test_clocks_that_differ_are_named(token: ServiceToken, clock: Clock, checker: ProofChecker, seconds: float) -> None:
    with pytest.raises(UnauthorizedError, match=r"62 s (old|in the future).*clocks"):
        checker.check(METHOD, token.prove_call(METHOD, clock.now + seconds))


def test_nothing_shows_the_token(token: ServiceToken) -> None:
    assert TOKEN not in repr(token) + str(token) + token.prove_call(METHOD)
    with pytest.raises(ConfigError) as caught:
        ServiceToken("too short")
    assert "too short" in str(caught.value) and "too short:" in caught.value.message


def test_parts_of_a_mac_cannot_be_shifted(token: ServiceToken) -> None:
    assert token.mac(b"reader", b"ab", b"c") != token.mac(b"reader", b"a", b"bc")
    assert token.mac(b"reader", b"ab") != token.mac(b"holder", b"ab")
