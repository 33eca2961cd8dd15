"""Flags and BIPHASE_* environment variables: the only place that reads the environment.

Every flag `--max-num-seqs` has a variable `BIPHASE_MAX_NUM_SEQS`; the flag wins. Each service composes the groups it
needs and parses once, into a frozen dataclass. Stdlib only. Names are vLLM's where vLLM has the setting.
"""

from __future__ import annotations

import argparse
import difflib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, NoReturn, TypeVar

from biphase.errors import ConfigError

ENV_PREFIX = "BIPHASE_"
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Flag:
    """One setting. `parse` turns text into the value and raises ValueError with a reason."""

    name: str
    parse: Callable[[str], Any]
    default: Any
    help: str
    choices: tuple[str, ...] | None = None
    # Given several times or comma-separated.
    many: bool = False
    # Handed on to child processes in their environment only: anybody may read another process's arguments.
    secret: bool = False

    @property
    def dest(self) -> str:
        return self.name.replace("-", "_")

    @property
    def env(self) -> str:
        return ENV_PREFIX + self.dest.upper()


def boolean(text: str) -> bool:
    lowered = text.strip().lower()
    if lowered in ("1", "true", "yes", "on"):
        return True
    if lowered in ("0", "false", "no", "off"):
        return False
    raise ValueError("expected true or false")


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError("must be at least 1")
    return value


def non_negative(text: str) -> int:
    value = int(text)
    if value < 0:
        raise ValueError("must not be negative")
    return value


def positive_seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise ValueError("must be a positive number of seconds")
    return value


def non_negative_seconds(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):
        raise ValueError("must be a number of seconds, 0 or more")
    return value


def fraction(text: str) -> float:
    value = float(text)
    if not 0 < value <= 1:
        raise ValueError("must be above 0 and at most 1")
    return value


def num_bytes(text: str) -> int:
    """`512MiB`, `2GiB`, `1.5G` or a plain number of bytes."""
    units = {"k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
    lowered = text.strip().lower().removesuffix("ib").removesuffix("b")
    scale = units.get(lowered[-1:], 1)
    value = int(float(lowered.rstrip("kmgt")) * scale)
    if value < 1:
        raise ValueError("must be a positive size")
    return value


# What the processes of one cluster show each other; how it is used is biphase.rpc.trust's business.
TRUST_FLAGS = (
    Flag(
        "service-token",
        str,
        "",
        "secret that all processes of a cluster share; whoever cannot prove it is refused, by gRPC and where KV blocks "
        "are read",
        secret=True,
    ),
    Flag("service-token-file", str, "", "file with the same, for secrets that come as files"),
    Flag("tls-cert", str, "", "PEM certificate (chain) of this process, for mutual TLS between services"),
    Flag("tls-key", str, "", "PEM key of --tls-cert"),
    Flag("tls-ca", str, "", "PEM certificate(s) of the authority that signed every service's certificate"),
    Flag("tls-name", str, "biphase", "DNS name in every service's certificate; empty: the address that is called"),
    Flag(
        "insecure",
        boolean,
        False,
        "lets a worker or store listen on other than loopback with neither service token nor TLS",
    ),
)


@dataclass(frozen=True, kw_only=True)
class TrustSettings:
    service_token: str
    service_token_file: str
    tls_cert: str
    tls_key: str
    tls_ca: str
    tls_name: str
    insecure: bool


COMMON_FLAGS = (
    Flag("ready-fd", non_negative, None, "file descriptor that gets one JSON line when the service is ready"),
    Flag("host", str, "127.0.0.1", "address to listen on; workers stay on loopback unless told"),
    Flag("port", non_negative, 0, "port to listen on; 0 takes a free one"),
    Flag(
        "redis-url",
        str,
        "",
        "redis://, rediss:// or unix:// URL of the index and registry; empty: run without one",
        secret=True,
    ),
    Flag("cluster", str, "default", "keeps several biphase clusters apart in one Redis"),
    Flag("log-format", str, "text", "text or json", choices=("text", "json")),
    Flag("log-level", str, "info", "debug, info, warning or error", choices=("debug", "info", "warning", "error")),
    Flag(
        "otlp-endpoint",
        str,
        "",
        "base URL of an OpenTelemetry collector (OTLP over HTTP) for traces; needs biphase[tracing]",
    ),
    Flag("drain-timeout", positive_seconds, 30.0, "seconds running requests get to end after SIGTERM"),
    *TRUST_FLAGS,
)


@dataclass(frozen=True, kw_only=True)
class CommonSettings(TrustSettings):
    """One field per flag in COMMON_FLAGS; see there for meaning and units. So it is with every class below."""

    ready_fd: int | None
    host: str
    port: int
    redis_url: str
    cluster: str
    log_format: str
    log_level: str
    otlp_endpoint: str
    drain_timeout: float


# A service that is a node of its own in the registry; `biphase serve` is none.
NODE_FLAGS = (*COMMON_FLAGS, Flag("node-id", str, "", "name in the registry; default: role, host and process id"))


@dataclass(frozen=True, kw_only=True)
class NodeSettings(CommonSettings):
    node_id: str


MODEL_FLAGS = (
    Flag("model", str, "", "folder of safetensors, .gguf file or hub id; default: the bundled SmolLM2-135M-Instruct"),
    Flag("served-model-name", str, (), "name(s) clients use; default: from the model", many=True),
    Flag("max-model-len", non_negative, 0, "longest prompt plus output, in tokens; 0: what the model allows"),
)


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    model: str
    served_model_name: tuple[str, ...]
    max_model_len: int


ENGINE_FLAGS = (
    Flag(
        "dtype", str, "auto", "auto, bfloat16, float16 or float32", choices=("auto", "bfloat16", "float16", "float32")
    ),
    Flag(
        "quantization",
        str,
        "none",
        "CPU: gguf multiplies as integers from the Q4_0, Q4_1 and Q8_0 blocks of a GGUF file; int8 rounds the weights "
        "of any model to int8; both round activations to int8 in groups of 32",
        choices=("none", "gguf", "int8"),
    ),
    Flag(
        "kv-cache-dtype",
        str,
        "auto",
        "auto: the model's; fp8 (the same as fp8_e4m3) keeps keys and values in 8 bits, in half the memory of bfloat16 "
        "or less, at some cost in accuracy; prefill and decode workers need the same",
        choices=("auto", "fp8", "fp8_e4m3"),
    ),
    Flag("device", str, "auto", "auto, cpu or cuda", choices=("auto", "cpu", "cuda")),
    Flag("block-size", positive, 16, "tokens in a KV block"),
    Flag("num-blocks", non_negative, 0, "KV blocks; 0: from --kv-cache-bytes or --gpu-memory-utilization"),
    Flag("kv-cache-bytes", num_bytes, None, "size of the KV cache on CPU, for example 2GiB; default: from free memory"),
    Flag("gpu-memory-utilization", fraction, 0.9, "share of the device's memory to use (GPU)"),
    Flag("max-num-seqs", positive, 64, "sequences in one step at most"),
    Flag("max-num-batched-tokens", positive, 512, "tokens in one step at most; longer prompts run in chunks"),
    Flag("enable-prefix-caching", boolean, True, "keep and reuse KV blocks of equal prefixes"),
    Flag("num-threads", non_negative, 0, "CPU threads that compute; 0: all cores this process may use"),
    Flag("nice", non_negative, 0, "scheduling niceness added to the compute threads (0 to 19)"),
    Flag("native-kernels", boolean, True, "use the compiled kernels; false runs plain torch"),
    Flag("enforce-eager", boolean, False, "GPU: launch the kernels of decode steps one by one, without CUDA graphs"),
    Flag(
        "overlap-scheduling",
        str,
        "auto",
        "decide and launch the next step while one runs; auto: on a GPU only. Steps wait for each other all the same "
        "while a request with structured output, penalties, bad words of several tokens or unmet min_tokens runs, on a "
        "GPU also one with top_p, top_k, logprobs, bad words, bias or allowed tokens",
        choices=("auto", "on", "off"),
    ),
    Flag("lease-seconds", positive_seconds, 10.0, "a block lease ends this long after its last renewal"),
    Flag("max-waiting", positive, 1024, "requests waiting for a place at most; more are refused"),
)


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    dtype: str
    quantization: str
    kv_cache_dtype: str
    device: str
    block_size: int
    num_blocks: int
    kv_cache_bytes: int | None
    gpu_memory_utilization: float
    max_num_seqs: int
    max_num_batched_tokens: int
    enable_prefix_caching: bool
    num_threads: int
    nice: int
    native_kernels: bool
    enforce_eager: bool
    overlap_scheduling: str
    lease_seconds: float
    max_waiting: int


# The settings of the gateway that `biphase serve` takes too. The gateway has more of its own.
API_FLAGS = (
    Flag("api-key", str, (), "key(s) that clients must send as a bearer token; none: no key is asked for", many=True,
         secret=True),
    Flag("api-key-file", str, "", "file with one key a line, its limits after it; read again when it changes"),
    Flag("requests-per-minute", non_negative, 0, "requests for text of one API key; 0: no limit"),
    Flag("tokens-per-minute", non_negative, 0, "prompt and output tokens of one API key; 0: no limit"),
    Flag("admin-key", str, "", "key for POST /drain and `biphase drain`; empty: nobody may", secret=True),
    Flag("chat-template", str, "", "Jinja file that replaces the model's own chat template"),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ApiSettings:
    api_key: tuple[str, ...]
    api_key_file: str
    requests_per_minute: int
    tokens_per_minute: int
    admin_key: str
    chat_template: str


class _Parser(argparse.ArgumentParser):
    """argparse, but one sentence for one mistake."""

    def error(self, message: str) -> NoReturn:
        known = [option for action in self._actions for option in action.option_strings]
        unknown = message.removeprefix("unrecognized arguments: ").split()[0].partition("=")[0]
        near = difflib.get_close_matches(unknown, known, 1, cutoff=0.75)
        hint = f"did you mean {near[0]}?" if near and unknown.startswith("--") else f"see {self.prog} --help"
        raise ConfigError(f"{message} ({hint})")


def _parser(prog: str, description: str, flags: Sequence[Flag]) -> argparse.ArgumentParser:
    parser = _Parser(prog=prog, description=description, usage=f"{prog} [flags]", allow_abbrev=False)
    for flag in flags:
        options: dict[str, Any] = {"dest": flag.dest, "default": None, "metavar": flag.dest.upper()}
        if flag.many:
            options["action"] = "append"
        shown = "" if flag.default in ("", (), None) else f" (default {flag.default})"
        parser.add_argument(f"--{flag.name}", help=f"{flag.help}{shown} [{flag.env}]".replace("%", "%%"), **options)
    return parser


def _convert(flag: Flag, text: str, source: str) -> Any:
    if flag.choices is not None and text not in flag.choices:
        raise ConfigError(f"{source}: {text!r} is not one of {', '.join(flag.choices)}")
    try:
        return flag.parse(text)
    except ValueError as error:
        raise ConfigError(f"{source}: {text!r} is not usable: {error}") from error


def parse_flags(
    prog: str,
    description: str,
    flags: Sequence[Flag],
    into: type[T],
    argv: Sequence[str] | None = None,
    environ: dict[str, str] | None = None,
    positional: Flag | None = None,
) -> T:
    """Parses flags over environment over defaults into the frozen dataclass `into`.

    Args:
        flags: every field of `into` needs one, by the flag's name with underscores.
        positional: an optional positional argument that stands for a flag of the same name (`serve MODEL`).

    Raises:
        ConfigError: a value that cannot be used, named with its source.
    """
    env = dict(os.environ) if environ is None else environ
    parser = _parser(prog, description, flags)
    if positional is not None:
        parser.usage = f"{prog} [{positional.dest.upper()}] [flags]"
        parser.add_argument(
            "positional", nargs="?", default=None, metavar=positional.dest.upper(), help=positional.help
        )
    parsed = parser.parse_args(argv)
    values: dict[str, Any] = {}
    for flag in flags:
        given = getattr(parsed, flag.dest)
        source = f"--{flag.name}"
        if given is None and positional is not None and flag.name == positional.name and parsed.positional is not None:
            given = parsed.positional
        if given is None and env.get(flag.env):
            given, source = env[flag.env], flag.env
        if given is None:
            values[flag.dest] = flag.default
        elif flag.many:
            texts = given.split(",") if isinstance(given, str) else [part for item in given for part in item.split(",")]
            values[flag.dest] = tuple(_convert(flag, text.strip(), source) for text in texts if text.strip())
        else:
            values[flag.dest] = _convert(flag, given, source)
    names = {field.name for field in fields(into)}  # type: ignore[arg-type]
    assert names == values.keys(), f"flags and {into.__name__} differ: {names ^ values.keys()}"
    return into(**values)
