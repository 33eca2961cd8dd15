"""The engine that biphase's workers share: paged KV cache, scheduling, models, block transfer, the block index."""

__version__ = "0.1.0"
