"""The console script `biphase`. Dispatches; imports what a command needs only when it is asked for."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import biphase
from biphase.errors import BiphaseError, ConfigError, ModelLoadError

# Each is a process of its own kind; the launcher turns into it and knows nothing more about it.
SERVICES = ("gateway", "prefill", "decode", "kvstore")

USAGE = f"""\
usage: biphase COMMAND [flags]

  serve [MODEL]   run the whole stack on this machine
  gateway         run one service; each is configured by flags and BIPHASE_* variables,
  prefill           see `biphase COMMAND --help`
  decode
  kvstore
  drain NODE      let one process finish what it has, take nothing new, and end (--url)
  status          show what a running gateway knows of its nodes (--watch, --json, --url)
  --version       {biphase.__version__}
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code; for the services it does not return."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    command = arguments[0] if arguments else ""
    rest = arguments[1:]
    if command in ("--version", "-V", "version"):
        print(f"biphase {biphase.__version__}")
        return 0
    if command in ("--help", "-h", "help"):
        print(USAGE, end="")
        return 0
    if command in SERVICES:
        os.execv(sys.executable, [sys.executable, "-m", f"services.{command}", *rest])
    try:
        if command == "serve":
            from services.launcher import serve

            return serve.main(rest)
        if command == "drain":
            from services.launcher import drain

            return drain.main(rest)
        if command == "status":
            from services.launcher import status

            return status.main(rest)
    except (ConfigError, ModelLoadError) as error:
        print(f"biphase: {error.message}", file=sys.stderr)
        return 2
    except BiphaseError as error:
        print(f"biphase: {error.message}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    known = ", ".join(("serve", *SERVICES, "drain", "status"))
    said = f"there is no command {command!r}" if command else "say what to do"
    print(f"biphase: {said}; commands are {known} (see biphase --help)", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
