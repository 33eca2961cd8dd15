"""One block in one file: header, payload, checksums.

Owns the form of the file, its name, and how it is written so that a reader sees all of it or notices. Owns no policy
(disk.py). There is no fsync: after a power cut a file may be torn, and then its checksum says so.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from pathlib import Path

import xxhash

from biphase.request import BlockHash

# magic, payload bytes, block hash, namespace, tenant (zero-padded), xxh3_128 of the payload
_FIELDS = struct.Struct("<8sQ32s32s64s16s")
_MAGIC = b"BPKVBLK1"
# The fields and their own xxh3_64, padded so that the payload starts at a page.
HEADER_BYTES = 4096
_HEADER_SUM = struct.Struct("<Q")
_MAX_TENANT_BYTES = 64


class BadBlockFileError(Exception):
    """A file that is torn, flipped, or not what its name says. Never leaves the kvstore."""


@dataclass(frozen=True, slots=True)
class BlockFile:
    """What the header says."""

    block_hash: BlockHash
    namespace: bytes
    tenant: str
    num_payload_bytes: int
    payload_sum: bytes

    def header(self) -> bytes:
        tenant = self.tenant.encode()
        assert len(tenant) <= _MAX_TENANT_BYTES, "a tenant is named by a digest"
        fields = _FIELDS.pack(_MAGIC, self.num_payload_bytes, self.block_hash, self.namespace, tenant, self.payload_sum)
        return (fields + _HEADER_SUM.pack(xxhash.xxh3_64_intdigest(fields))).ljust(HEADER_BYTES, b"\0")


@dataclass(frozen=True, slots=True)
class LeftBehind:
    """Files of an earlier life. `blocks`: last used first."""

    blocks: list[Path]
    unfinished: list[Path]


def path_of(folder: Path, block_hash: BlockHash) -> Path:
    name = block_hash.hex()
    return folder / name[:2] / name


def left_behind(folder: Path) -> LeftBehind:
    """What stands in the folder, by its names; whether it is whole is another question."""
    found: list[tuple[float, Path]] = []
    unfinished: list[Path] = []
    for path in folder.glob("??/*"):
        if path.suffix == ".part":
            unfinished.append(path)
        elif len(path.name) == 64 and all(c in "0123456789abcdef" for c in path.name):
            try:
                found.append((path.stat().st_mtime, path))
            except OSError:
                continue
    return LeftBehind([path for _, path in sorted(found, reverse=True)], unfinished)


def write_block(path: Path, block_hash: BlockHash, namespace: bytes, tenant: str, payload: memoryview) -> None:
    """Writes the file beside its place, then moves it there.

    Raises:
        OSError: it is not there; nothing is left behind.
    """
    described = BlockFile(block_hash, namespace, tenant, len(payload), xxhash.xxh3_128_digest(payload))
    beside = path.with_suffix(".part")
    try:
        fd = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            rest = [memoryview(described.header()), payload]
            while rest:
                written = os.writev(fd, rest)
                while rest and written >= len(rest[0]):
                    written -= len(rest.pop(0))
                if rest:
                    rest[0] = rest[0][written:]
        finally:
            os.close(fd)
        os.rename(beside, path)
    except OSError:
        beside.unlink(missing_ok=True)
        raise


def read_block(path: Path, block_hash: BlockHash, namespace: bytes, into: memoryview) -> BlockFile:
    """Reads the payload into `into`, which it fills exactly, and checks everything.

    Raises:
        BadBlockFileError: `into` holds rubbish.
        OSError: not there, or the disk failed.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        header = bytearray(HEADER_BYTES)
        count = os.preadv(fd, [header, into], 0)
        while 0 < count < HEADER_BYTES + len(into):
            more = os.preadv(fd, [into[count - HEADER_BYTES :]], count) if count >= HEADER_BYTES else 0
            if more == 0:
                break
            count += more
        described = _parsed(bytes(header[: min(count, HEADER_BYTES)]))
        if described.block_hash != block_hash or described.namespace != namespace:
            raise BadBlockFileError("it holds another block than its name says")
        if described.num_payload_bytes != len(into) or os.fstat(fd).st_size != HEADER_BYTES + len(into):
            raise BadBlockFileError(f"it has {os.fstat(fd).st_size} bytes instead of {HEADER_BYTES + len(into)}")
        if count < HEADER_BYTES + len(into) or xxhash.xxh3_128_digest(into) != described.payload_sum:
            raise BadBlockFileError("its payload does not match its checksum")
        return described
    finally:
        os.close(fd)


def _parsed(header: bytes) -> BlockFile:
    if len(header) < HEADER_BYTES:
        raise BadBlockFileError("its header is torn")
    fields = header[: _FIELDS.size]
    (found,) = _HEADER_SUM.unpack_from(header, _FIELDS.size)
    if xxhash.xxh3_64_intdigest(fields) != found:
        raise BadBlockFileError("its header does not match its checksum")
    magic, num_bytes, block_hash, namespace, tenant, payload_sum = _FIELDS.unpack(fields)
    if magic != _MAGIC:
        raise BadBlockFileError("it is of another version")
    return BlockFile(
        BlockHash(block_hash), namespace, tenant.rstrip(b"\0").decode("ascii", "replace"), num_bytes, payload_sum
    )
