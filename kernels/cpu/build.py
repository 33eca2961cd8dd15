"""Compiles the C++ kernels into one shared library beside this file. Stdlib only: the package's build hook loads this
file by path, before anything is installed.

    python -m kernels.cpu.build [--output PATH]
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
LIBRARY = FOLDER / "libbiphase_cpu.so"

# No contraction: a fused multiply-add is written where it is meant, or results would depend on how code is inlined.
_FLAGS = (
    "-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-fno-exceptions", "-fno-rtti", "-ffp-contract=off",
)  # fmt: skip
_AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx2", "-mfma", "-mf16c")
# The instruction sets that a source needs beyond the machine's baseline; which one runs is chosen at run time.
_X86_SOURCES = {
    "isa_avx2.cpp": ("-mavx2", "-mfma", "-mf16c"),
    "isa_avx512.cpp": _AVX512,
    "isa_avx512_bf16.cpp": (*_AVX512, "-mavx512bf16", "-mavx512vnni"),
}
# Left out where the compiler is too old to know them.
_AMX_SOURCE = "isa_amx.cpp"
_AMX_FLAGS = (*_X86_SOURCES["isa_avx512_bf16.cpp"], "-mamx-tile", "-mamx-bf16", "-mamx-int8")
_COMMON_SOURCES = (
    "isa_generic.cpp", "pool.cpp", "program.cpp", "pack.cpp", "pack_dot8.cpp", "draw.cpp", "checksum.cpp",
)  # fmt: skip


class BuildError(Exception):
    """The library could not be compiled; the text says why."""


def find_compiler() -> str | None:
    """`$CXX`, else the first C++ compiler on the path."""
    named = os.environ.get("CXX")
    for candidate in (named,) if named else ("g++", "c++", "clang++"):
        if candidate and (found := shutil.which(candidate)):
            return found
    return None


def build(output: Path = LIBRARY) -> Path:
    """Compiles and links; an existing library is replaced in one step, so that running processes keep theirs.

    Raises:
        BuildError: no compiler, or the compiler's own words.
    """
    compiler = find_compiler()
    if compiler is None:
        raise BuildError("no C++ compiler found (looked for $CXX, g++, c++, clang++)")
    sources: dict[str, tuple[str, ...]] = dict.fromkeys(_COMMON_SOURCES, ())
    if platform.machine() in ("x86_64", "AMD64"):
        sources |= _X86_SOURCES
        if _knows(compiler, _AMX_FLAGS):
            sources |= {_AMX_SOURCE: _AMX_FLAGS, "program.cpp": ("-DBP_WITH_AMX",)}
    with tempfile.TemporaryDirectory(prefix="biphase-build-") as folder:
        objects = [str(Path(folder, source).with_suffix(".o")) for source in sources]
        commands = [
            [compiler, *_FLAGS, *flags, "-c", str(FOLDER / "src" / source), "-o", target]
            for (source, flags), target in zip(sources.items(), objects, strict=True)
        ]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(_run, commands))
        unfinished = output.with_name(f".{output.name}.{os.getpid()}")
        try:
            _run([compiler, "-shared", "-o", str(unfinished), *objects, "-lpthread"])
            os.replace(unfinished, output)
        finally:
            unfinished.unlink(missing_ok=True)
    return output


def _knows(compiler: str, flags: tuple[str, ...]) -> bool:
    command = [compiler, *flags, "-x", "c++", "-E", os.devnull, "-o", os.devnull]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise BuildError(f"{' '.join(command)}\n{done.stderr.strip()}")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m kernels.cpu.build", description="Compile the CPU kernels.")
    parser.add_argument("--output", type=Path, default=LIBRARY)
    try:
        print(build(parser.parse_args(argv).output))
    except BuildError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
