"""What mutual TLS costs the data plane: the same blocks over tcp, in plain text and encrypted, as a ratio.

    python -m tests.bench.bench_tls [--size 65536] [--mib 256] [--rounds 5]

One holder process and one reader process of this machine, over loopback. Rounds alternate; medians are compared. The
same with a service token and without, which should cost nothing: it is asked for once per connection.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from biphase.rpc.tls import Tls
from biphase.rpc.token import ServiceToken
from biphase.rpc.trust import OPEN, Trust
from tests.security.authority import Authority
from tests.transfer.holders import Destination, Holder, endpoint_from_json, endpoint_to_json

_TOKEN = "a token for this measurement"


def trust_named(name: str, folder: Path) -> Trust:
    if name == "plain":
        return OPEN
    pki = folder / "pki"
    tls = Tls.read(str(pki / "a.crt"), str(pki / "a.key"), str(pki / "ca.crt"), "biphase") if name == "tls" else None
    return Trust(ServiceToken(_TOKEN), tls)


def hold(name: str, folder: Path, num_blocks: int, size: int) -> None:
    holder = Holder(num_blocks, size, transports=("tcp",), trust=trust_named(name, folder))
    print(json.dumps({"endpoint": endpoint_to_json(holder.endpoint), "lease_id": holder.lease_id}), flush=True)
    while True:
        time.sleep(3)
        holder.leases.renew([holder.lease_id])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=int, default=65536, help="bytes of a block")
    parser.add_argument("--mib", type=int, default=256, help="MiB in one read")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--hold", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    num_blocks = given.mib * 2**20 // given.size
    if given.hold:
        hold(given.hold[0], Path(given.hold[1]), num_blocks, given.size)
    rates: dict[str, list[float]] = {"plain": [], "token": [], "tls": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        Authority(folder / "pki").issue("a")
        holders, readers = {}, {}
        try:
            for kind in rates:
                command = [sys.executable, "-m", "tests.bench.bench_tls", "--hold", kind, name]
                command += ["--size", str(given.size), "--mib", str(given.mib)]
                holders[kind] = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
                stdout = holders[kind].stdout
                assert stdout is not None
                said = json.loads(stdout.readline())
                readers[kind] = (
                    Destination(num_blocks, given.size, ("tcp",), trust=trust_named(kind, folder)),
                    endpoint_from_json(said["endpoint"]),
                    said["lease_id"],
                )
            for _ in range(given.rounds + 1):
                for kind, (destination, endpoint, lease_id) in readers.items():
                    requests = destination.requests([(block, block) for block in range(num_blocks)])
                    result = destination.reader.read(endpoint, lease_id, requests, 60.0).result()
                    assert result.error is None, result.error
                    rates[kind].append(result.num_bytes / result.seconds / 1e9)
        finally:
            for destination, *_ in readers.values():
                destination.close()
            for process in holders.values():
                process.kill()
                process.wait()
                if process.stdout is not None:
                    process.stdout.close()
    # The first round connects.
    medians = {kind: statistics.median(values[1:]) for kind, values in rates.items()}
    print(json.dumps({"size": given.size, "gigabytes_per_second": {k: round(v, 2) for k, v in medians.items()},
                      "token_to_plain": round(medians["token"] / medians["plain"], 2),
                      "tls_to_plain": round(medians["tls"] / medians["plain"], 2)}))  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
