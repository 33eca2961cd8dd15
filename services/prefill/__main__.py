"""`python -m services.prefill`: one prefill worker."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from biphase.rpc.server import Registration
from biphase.rpc.v1 import prefill_pb2_grpc
from biphase.worker.process import run_worker
from biphase.worker.worker import Worker
from services.prefill.servicer import PrefillServicer


def _register(worker: Worker) -> Registration:
    servicer = PrefillServicer(worker)
    return lambda server: prefill_pb2_grpc.add_PrefillServicer_to_server(servicer, server)


def main(argv: Sequence[str] | None = None) -> int:
    return run_worker("prefill", _register, argv)


if __name__ == "__main__":
    sys.exit(main())
