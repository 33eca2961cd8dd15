"""`python -m services.decode`: one decode worker."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from biphase.rpc.server import Registration
from biphase.rpc.v1 import decode_pb2_grpc
from biphase.worker.process import run_worker
from biphase.worker.worker import Worker
from services.decode.servicer import DecodeServicer


def _register(worker: Worker) -> Registration:
    servicer = DecodeServicer(worker)
    return lambda server: decode_pb2_grpc.add_DecodeServicer_to_server(servicer, server)


def main(argv: Sequence[str] | None = None) -> int:
    return run_worker("decode", _register, argv)


if __name__ == "__main__":
    sys.exit(main())
