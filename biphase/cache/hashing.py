"""The hash chain that names KV blocks: the same bytes in memory, events, index and wire.

A block's hash covers every token before it, so equal hashes mean equal KV content under one namespace and salt. It is
SHA-256, never Python's `hash()`, which differs between processes.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Mapping, Sequence

from biphase.request import BlockHash

SCHEMA_VERSION = "1"


def namespace_digest(fields: Mapping[str, str]) -> bytes:
    """SHA-256 over what KV bytes depend on (weights, tokenizer, dtype, layout, block size, rope, adapter).

    Args:
        fields: name -> value; order does not matter.

    Returns:
        32 bytes.
    """
    digest = hashlib.sha256(b"biphase.namespace." + SCHEMA_VERSION.encode())
    for name in sorted(fields):
        for part in (name, fields[name]):
            raw = part.encode()
            digest.update(len(raw).to_bytes(8, "little") + raw)
    return digest.digest()


def root_hash(namespace: bytes, cache_salt: str) -> BlockHash:
    """Parent of a chain's first block: separates namespaces and tenants."""
    salt = cache_salt.encode()
    return BlockHash(hashlib.sha256(b"biphase.root." + namespace + len(salt).to_bytes(8, "little") + salt).digest())


def chain(parent: bytes, token_ids: Sequence[int]) -> BlockHash:
    """Hash of the block holding `token_ids` after `parent`. Also used for a partial last block (COMMIT)."""
    return BlockHash(hashlib.sha256(parent + array("I", token_ids).tobytes()).digest())


def extend_block_hashes(hashes: list[BlockHash], root: BlockHash, token_ids: Sequence[int], block_size: int) -> None:
    """Appends the hashes of the full blocks of `token_ids` that `hashes` does not name yet."""
    parent: bytes = hashes[-1] if hashes else root
    for start in range(len(hashes) * block_size, len(token_ids) - block_size + 1, block_size):
        parent = chain(parent, token_ids[start : start + block_size])
        hashes.append(BlockHash(parent))


def commit_hash(hashes: Sequence[BlockHash], root: BlockHash, token_ids: Sequence[int], block_size: int) -> BlockHash:
    """Chain hash over all of `token_ids`, a partial last block included: what PrefillDone carries.

    `hashes` must already name every full block of `token_ids`.
    """
    full = len(token_ids) // block_size
    parent: bytes = hashes[full - 1] if full else root
    rest = token_ids[full * block_size :]
    return chain(parent, rest) if rest else BlockHash(parent)
