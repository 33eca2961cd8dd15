"""One NIXL agent: the few calls of NIXL that are used, and how to get rid of it for good.

Owns the import of NIXL, which is optional, and the life of its handles. Knows blocks as equal runs of bytes, no more;
the nixl transport (nixl.py) says why it is used as it is.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import logging
import uuid
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from biphase.cache.memory import BlockMemory, SharedRegion
from biphase.errors import ConfigError

# Between two looks: each does all that can be done at once, so the pause costs latency and not speed.
POLL_SECONDS = 0.00005
BlockIds = npt.NDArray[np.int32]
_MODULES = ("nixl_cu13._api", "nixl_cu12._api")


def load_nixl() -> Any:
    """The NIXL API module.

    Raises:
        ConfigError: it is not installed.
    """
    for name in _MODULES:
        if importlib.util.find_spec(name.partition(".")[0]) is not None:
            raise_exceptions = logging.raiseExceptions
            module = importlib.import_module(name)
            # Importing it configures logging for the whole process.
            logging.raiseExceptions = raise_exceptions
            logger = logging.getLogger("nixl")
            logger.handlers.clear()
            logger.propagate = True
            logger.setLevel(logging.WARNING)
            return module
    raise ConfigError("the nixl transport needs NIXL, which is not installed: pip install 'biphase[nixl]'")


class Agent:
    """One NIXL agent with registered memory; belongs to the thread that made it."""

    def __init__(self, name: str, regions: Sequence[BlockMemory | SharedRegion]) -> None:
        api = load_nixl()
        config = api.nixl_agent_config(
            enable_prog_thread=False, sync_mode=api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
        )
        self.api: Any = api.nixl_agent(f"{name}/{uuid.uuid4().hex}", config)
        self.api.register_memory([(region.address, region.num_bytes, 0, "") for region in regions], "DRAM")
        # All handles given out; each refers to the agent.
        self._handles: list[Any] = []

    def blocks(self, owner: str, address: int, block_bytes: int, num_blocks: int) -> Any:
        """A descriptor list of equal blocks from `address` on; "" is this agent as the reading side."""
        strided = np.array([[address, block_bytes, 0, block_bytes, num_blocks]], np.uint64)
        self._handles.append(self.api.prep_xfer_dlist(owner or "NIXL_INIT_AGENT", strided, "DRAM"))
        return self._handles[-1]

    def start(self, local: Any, here: BlockIds, remote: Any, there: BlockIds) -> tuple[Any, str]:
        """Posts a READ of blocks `there` into blocks `here`. Returns its handle and state."""
        handle = self.api.make_prepped_xfer("READ", local, here, remote, there)
        self._handles.append(handle)
        return handle, self.api.transfer(handle)

    def finish(self, handle: Any) -> None:
        handle.release()
        self._handles.remove(handle)

    def destroy(self) -> None:
        """Ends whatever is still going on. When this returns nothing can write into the registered memory."""
        for handle in self._handles:
            with contextlib.suppress(Exception):
                handle.release()
            # Not by leaving it to the last reference: an exception on its way up may hold one for long.
            handle._released = True
            handle._agent = None
        self._handles.clear()
        self.api.agent = None
