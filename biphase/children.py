"""Child processes that do not outlive whoever started them, however that ends. Standard library only."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1


def dies_with_parent(signum: signal.Signals = signal.SIGKILL) -> Callable[[], None]:
    """For Popen's preexec_fn: the child gets a signal when the thread that started it ends.

    Everything that the hook needs between fork and exec is looked up before the fork.
    """
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    parent = os.getpid()
    number = int(signum)

    def hook() -> None:
        prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
        if os.getppid() != parent:
            # The parent died between fork and prctl.
            os._exit(1)

    return hook
