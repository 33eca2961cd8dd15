"""`python -m biphase.rpc.probe HOST:PORT`: exit code 0 when the gRPC server there says SERVING.

For health checks in places that have no gRPC prober of their own. With --drain it tells the process behind it to drain
instead, and waits until it has stopped or the time is over. Token and certificates come from the same BIPHASE_*
variables as the process's own. Owns nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Sequence

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from biphase.errors import ConfigError
from biphase.rpc.trust import OPEN, Trust, trust_of
from biphase.rpc.v1 import node_pb2, node_pb2_grpc
from biphase.settings import TRUST_FLAGS, TrustSettings, parse_flags


def is_serving(address: str, timeout_seconds: float, trust: Trust = OPEN) -> bool:
    """Asks the standard health service once.

    Raises:
        grpc.RpcError: nobody answers there.
    """
    with contextlib.closing(trust.blocking_channel(address)) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=timeout_seconds)
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def drain(address: str, timeout_seconds: float, trust: Trust = OPEN) -> None:
    """Tells the process to drain; returns when it no longer answers, or after `timeout_seconds`.

    Raises:
        grpc.RpcError: nobody answers there to begin with.
    """
    deadline = time.monotonic() + timeout_seconds
    with contextlib.closing(trust.blocking_channel(address)) as channel:
        node_pb2_grpc.NodeStub(channel).Drain(node_pb2.DrainRequest(timeout_seconds=timeout_seconds), timeout=5.0)
        while time.monotonic() < deadline:
            try:
                node_pb2_grpc.NodeStub(channel).GetInfo(node_pb2.GetInfoRequest(), timeout=2.0)
            except grpc.RpcError as error:
                # One that is slow to answer, or errs, is still there.
                if error.code() is grpc.StatusCode.UNAVAILABLE:
                    return
            time.sleep(0.2)


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0 (serving, or drained), 1 (not serving) or 2 (nobody answers, or refuses); says why on stderr."""
    parser = argparse.ArgumentParser(prog="python -m biphase.rpc.probe", description="Ask a process for its health.")
    parser.add_argument("address", metavar="HOST:PORT")
    parser.add_argument("--timeout", type=float, default=3.0, metavar="SECONDS")
    parser.add_argument("--drain", action="store_true", help="tell it to drain, and wait until it is gone")
    given = parser.parse_args(argv)
    try:
        trust = trust_of(parse_flags(parser.prog, "", TRUST_FLAGS, TrustSettings, []))
        if given.drain:
            drain(given.address, given.timeout, trust)
            return 0
        if is_serving(given.address, given.timeout, trust):
            return 0
    except ConfigError as error:
        print(error.message, file=sys.stderr)
        return 2
    except grpc.RpcError as error:
        print(f"{given.address}: {error.details() or error.code()}", file=sys.stderr)
        return 2
    print(f"{given.address}: not serving", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
