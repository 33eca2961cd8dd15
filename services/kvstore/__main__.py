"""`python -m services.kvstore`: one block store."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence

from biphase.errors import BiphaseError, ConfigError
from biphase.index.registry import default_node_id
from biphase.settings import parse_flags
from biphase.telemetry import events, tracing
from services.kvstore.process import serve
from services.kvstore.settings import KVSTORE_FLAGS, KvstoreSettings

_DESCRIPTION = "Holds KV blocks for all workers, in memory and on disk, so that a prefix computed once stays found."


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 after a drain, 2 for settings that cannot be used, 1 for anything else."""
    try:
        settings = parse_flags("biphase kvstore", _DESCRIPTION, KVSTORE_FLAGS, KvstoreSettings, argv)
        settings.check()
        events.configure(settings.node_id or "kvstore", log_format=settings.log_format, level=settings.log_level)
        tracing.configure("kvstore", settings.node_id or default_node_id("kvstore"), settings.otlp_endpoint)
        asyncio.run(serve(settings))
    except BiphaseError as error:
        print(f"biphase kvstore: {error.message}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
