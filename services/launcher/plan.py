"""Turns the settings of `biphase serve` into the processes to run: arguments, environment, order. Plain data.

Defaults that make a box with both roles behave, and why:

- Every worker may use all cores; prefill's compute threads run at nice 9. Decode then hardly feels a long prompt, and
  prefill takes whatever decode leaves, which a fixed split of the cores would waste.
- OpenMP threads wait passively. Spinning ones would eat the core that the other role needs, and idle workers would
  never be idle.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace

from biphase.settings import API_FLAGS, COMMON_FLAGS, ENGINE_FLAGS, MODEL_FLAGS, Flag
from services.launcher.child import ChildSpec
from services.launcher.settings import SERVE_FLAGS, ServeSettings

PREFILL_NICE = 9
# The services listen here; only the gateway listens where the user says.
LOOPBACK = "127.0.0.1"

# Order of start and of end. The gateway starts last, so that its port opens onto something that serves, and ends
# first, so that running requests still have their workers.
_START_STAGE = {"kvstore": 0, "prefill": 0, "decode": 0, "gateway": 1}
_STOP_STAGE = {"gateway": 0, "decode": 1, "prefill": 1, "kvstore": 2}

_WORKER_FLAGS = (*COMMON_FLAGS, *MODEL_FLAGS, *ENGINE_FLAGS)
_FLAGS_OF_ROLE: Mapping[str, tuple[Flag, ...]] = {
    "prefill": _WORKER_FLAGS,
    "decode": _WORKER_FLAGS,
    "kvstore": COMMON_FLAGS,
    "gateway": (*COMMON_FLAGS, *MODEL_FLAGS, *API_FLAGS),
}


def children(
    settings: ServeSettings, *, redis_url: str, num_threads: int, environ: Mapping[str, str]
) -> tuple[ChildSpec, ...]:
    """The processes of one box.

    Args:
        redis_url: the embedded server's, or the user's.
        num_threads: compute threads of each worker.
        environ: this process's environment, which the children inherit but for the settings that `serve` took.
    """
    inherited = _inherited(environ)
    settings = replace(settings, redis_url=redis_url, num_threads=num_threads)
    prefill = settings if settings.nice or settings.prefill == 0 else replace(settings, nice=PREFILL_NICE)
    worker_environ = {**inherited, **child_environ(num_threads)}
    # One thread is plenty for those that compute nothing.
    service_environ = {**inherited, **child_environ(1)}
    specs = [
        *(_child("prefill", n, prefill, prefill.prefill_args, worker_environ) for n in range(settings.prefill)),
        *(_child("decode", n, settings, settings.decode_args, worker_environ) for n in range(settings.decode)),
        _child("gateway", 0, settings, settings.gateway_args, service_environ),
    ]
    if settings.kvstore:
        specs.insert(0, _child("kvstore", 0, settings, settings.kvstore_args, service_environ))
    return tuple(specs)


def child_environ(num_threads: int) -> dict[str, str]:
    """How the libraries in a child shall use threads and stderr, whatever the launcher's own environment says."""
    return {
        "OMP_NUM_THREADS": str(num_threads),
        "MKL_NUM_THREADS": str(num_threads),
        "OMP_WAIT_POLICY": "PASSIVE",
        "KMP_BLOCKTIME": "0",
        "TOKENIZERS_PARALLELISM": "false",
        # gRPC's core writes a line of its own to stderr whenever a peer goes; the services log that themselves.
        "GRPC_VERBOSITY": "ERROR",
        "PYTHONUNBUFFERED": "1",
    }


def flag_arguments(flags: Sequence[Flag], values: object) -> tuple[str, ...]:
    """Flags that give a child the values that differ from its defaults. Secrets are left out.

    Args:
        values: an object with the flags' fields; flags it has no field for keep their default.
    """
    arguments: list[str] = []
    for flag in flags:
        value = getattr(values, flag.dest, flag.default)
        if value != flag.default and not flag.secret:
            arguments += [f"--{flag.name}", flag_text(value)]
    return tuple(arguments)


def secret_environ(flags: Sequence[Flag], values: object) -> dict[str, str]:
    """The same for secrets, as environment variables."""
    given = {flag.env: getattr(values, flag.dest, flag.default) for flag in flags if flag.secret}
    return {name: flag_text(value) for name, value in given.items() if value}


def flag_text(value: object) -> str:
    """A setting's value as text that parses to the same value."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return ",".join(flag_text(item) for item in value)
    return str(value)


def _child(
    role: str, number: int, settings: ServeSettings, extra: tuple[str, ...], environ: Mapping[str, str]
) -> ChildSpec:
    flags = _FLAGS_OF_ROLE[role]
    if role != "gateway":
        settings = replace(settings, host=LOOPBACK, port=0)
    # Its own, one per child.
    settings = replace(settings, ready_fd=None)
    name = f"{role}-{number}"
    return ChildSpec(
        name=name,
        argv=(sys.executable, "-m", f"services.{role}", "--node-id", name, *flag_arguments(flags, settings), *extra),
        environ={**environ, **secret_environ(flags, settings)},
        start_stage=_START_STAGE[role],
        stop_stage=_STOP_STAGE[role],
    )


def _inherited(environ: Mapping[str, str]) -> dict[str, str]:
    # BIPHASE_PORT=8000 was meant for the gateway; a worker must not take it too.
    taken = {flag.env for flag in SERVE_FLAGS}
    return {name: value for name, value in environ.items() if name not in taken}
