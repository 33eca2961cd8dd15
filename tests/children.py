"""Child processes that do not outlive the tests, however those end."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1


def dies_with_parent() -> Callable[[], None]:
    """For Popen's preexec_fn: SIGKILL when the thread that started the child ends. Start from the main thread."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    parent = os.getpid()
    sigkill = int(signal.SIGKILL)

    def hook() -> None:
        prctl(_PR_SET_PDEATHSIG, sigkill, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)

    return hook
