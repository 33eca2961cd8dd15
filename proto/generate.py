"""Generates biphase/rpc/v1 from proto/biphase/rpc/v1, or with --check says what differs.

The generated files are committed, so that an install needs no protoc; `make check` runs this with --check.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from importlib import resources
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).parent.parent
SOURCES = sorted((ROOT / "proto" / "biphase" / "rpc" / "v1").glob("*.proto"))
COMMITTED = ROOT / "biphase" / "rpc" / "v1"


def generate(into: Path) -> None:
    """Writes *_pb2.py, *_pb2.pyi and *_pb2_grpc.py under `into`/biphase/rpc/v1."""
    status = protoc.main(
        [
            "protoc",
            f"--proto_path={ROOT / 'proto'}",
            f"--proto_path={resources.files('grpc_tools') / '_proto'}",
            f"--python_out={into}",
            f"--pyi_out={into}",
            f"--grpc_python_out={into}",
            *(str(source) for source in SOURCES),
        ]
    )
    if status != 0:
        raise SystemExit(status)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when the committed files differ")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder))
        fresh = {path.name: path.read_bytes() for path in (Path(folder) / "biphase" / "rpc" / "v1").iterdir()}
    committed = {path.name: path.read_bytes() for path in COMMITTED.glob("*_pb2*.py*")}
    if not arguments.check:
        for name in committed.keys() - fresh.keys():
            (COMMITTED / name).unlink()
        for name, content in fresh.items():
            (COMMITTED / name).write_bytes(content)
        return 0
    different = sorted(name for name in fresh.keys() | committed.keys() if fresh.get(name) != committed.get(name))
    if different:
        print(f"biphase/rpc/v1 differs from proto/: {', '.join(different)}; run `make proto`", file=sys.stderr)
        return 1
    print(f"biphase/rpc/v1 is what proto/ generates ({len(fresh)} files)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
