"""The first exchange on a data connection: who are you, do our bytes mean the same, how fast is it between us.

Owns both sides of HELLO, CHALLENGE and PROOF, WELCOME or REFUSE, and the test pattern. Nothing is read before both have
agreed on incarnation and on every field of the layout. Where there is a service token, each side has shown before that
it has it, without sending it, and a peer that has not learns nothing but that.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import secrets
import time
from collections.abc import Container
from dataclasses import dataclass

from biphase.errors import (
    BiphaseError,
    LayoutMismatchError,
    StaleHandleError,
    TransferFailedError,
    UnauthorizedError,
)
from biphase.rpc.token import ServiceToken
from biphase.transfer import frames
from biphase.transfer.endpoint import Endpoint
from biphase.transfer.frames import FrameError, Kind
from biphase.transfer.layout import KVLayout
from biphase.transfer.reslice import Reslice
from biphase.transfer.sockets import DeadlineSocket

# The pattern moved at handshake: pieces of this many bytes, the first of which is not timed.
PATTERN_BYTES = 1024 * 1024
NUM_PATTERNS = 4

_REFUSALS: dict[str, type[BiphaseError]] = {
    error.code.value: error for error in (LayoutMismatchError, StaleHandleError, TransferFailedError, UnauthorizedError)
}
_NONCE_BYTES = 32
_MAC_BYTES = 32


@dataclass(frozen=True, slots=True)
class Hello:
    """Who asks, and whom it thinks it asks."""

    node_id: str
    incarnation: str
    holder_node_id: str
    holder_incarnation: str
    layout: KVLayout
    # What the reader takes the holder's layout for.
    holder_layout: KVLayout
    # How the blocks are to be moved: "tcp", "shm" or "nixl".
    transport: str


@dataclass(frozen=True, slots=True)
class Welcome:
    """What a reader has to know about a holder beyond its endpoint."""

    num_blocks: int
    # Blocks in a batch, but for the last of a READ.
    batch_blocks: int


@functools.cache
def test_pattern() -> bytes:
    """PATTERN_BYTES that no broken path produces by chance; the same in every process."""
    piece = hashlib.shake_256(b"biphase test pattern").digest(65536)
    return piece * (PATTERN_BYTES // len(piece))


def introduce(
    sock: DeadlineSocket, endpoint: Endpoint, hello: Hello, deadline: float, token: ServiceToken | None = None
) -> Welcome:
    """The reader's side.

    Raises:
        LayoutMismatchError: refused; the message names the field.
        UnauthorizedError: one of the two has no service token, or another.
        StaleHandleError: the holder is another incarnation than the endpoint's.
        TransferFailedError: refused for another reason, no answer in time, or not this protocol.
    """
    said = {
        "node_id": hello.node_id,
        "incarnation": hello.incarnation,
        "holder_node_id": hello.holder_node_id,
        "holder_incarnation": hello.holder_incarnation,
        "layout": hello.layout.to_json(),
        "holder_layout": hello.holder_layout.to_json(),
        "transport": hello.transport,
    }
    frame = frames.pack_json(Kind.HELLO, said)
    sock.send_bytes(frame, deadline)
    kind, raw = sock.recv_frame(deadline, frames.MAX_HELLO_BYTES)
    challenge = b""
    if kind is Kind.CHALLENGE:
        if token is None:
            raise UnauthorizedError(f"{endpoint.node_id} wants the service token of its cluster, and none is set here")
        if len(raw) != _NONCE_BYTES:
            raise FrameError(f"a challenge of {len(raw)} bytes")
        challenge = raw
        sock.send_bytes(_pack(Kind.PROOF, token.mac(b"reader", frame, challenge)), deadline)
        kind, raw = sock.recv_frame(deadline, frames.MAX_HELLO_BYTES)
    body = frames.unpack_json(raw)
    if kind is Kind.REFUSE:
        refusal = _REFUSALS.get(frames.text_field(body, "code"), TransferFailedError)
        raise refusal(frames.text_field(body, "message"))
    if kind is not Kind.WELCOME:
        raise FrameError(f"a {kind.name} frame in place of WELCOME")
    if token is not None:
        wanted = token.mac(b"holder", frame, challenge).hex()
        if not challenge or not hmac.compare_digest(wanted.encode(), str(body.get("mac")).encode()):
            raise UnauthorizedError(f"{endpoint.node_id} does not show that it has the service token of this cluster")
    if frames.text_field(body, "incarnation") != endpoint.incarnation:
        raise StaleHandleError(f"{endpoint.node_id} has restarted: its handles are void")
    return Welcome(
        num_blocks=frames.count_field(body, "num_blocks", 1, 2**32),
        batch_blocks=frames.count_field(body, "batch_blocks", 1, frames.MAX_BATCH_BLOCKS),
    )


def measure_pattern(sock: DeadlineSocket, deadline: float) -> float:
    """Receives and checks the test pattern. Returns GB/s.

    Raises:
        TransferFailedError: bytes arrived changed, or not in time.
    """
    piece = memoryview(bytearray(PATTERN_BYTES))
    seconds = 0.0
    for position in range(NUM_PATTERNS):
        start = time.perf_counter()
        sock.recv_into([piece], PATTERN_BYTES, deadline)
        if position:
            seconds += time.perf_counter() - start
        if piece != test_pattern():
            raise TransferFailedError("the test pattern arrived changed")
    return (NUM_PATTERNS - 1) * PATTERN_BYTES / max(seconds, 1e-9) / 1e9


def send_pattern(sock: DeadlineSocket, deadline: float) -> None:
    sock.send([test_pattern()] * NUM_PATTERNS, NUM_PATTERNS * PATTERN_BYTES, deadline)


def answer(
    sock: DeadlineSocket,
    me: Endpoint,
    welcome: Welcome,
    transports: Container[str],
    deadline: float,
    token: ServiceToken | None = None,
) -> Hello:
    """The holder's side. Sends WELCOME or REFUSE.

    Args:
        transports: that can be had over this connection.

    Raises:
        LayoutMismatchError, StaleHandleError, UnauthorizedError: refused, and the reader was told why.
        TransferFailedError: no HELLO in time, or not this protocol.
    """
    kind, raw = sock.recv_frame(deadline, frames.MAX_HELLO_BYTES)
    if kind is not Kind.HELLO:
        raise FrameError(f"a {kind.name} frame in place of HELLO")
    # Before anything that was said is looked at.
    mac = {} if token is None else {"mac": _challenge(sock, _pack(kind, raw), token, deadline)}
    hello = _parse_hello(frames.unpack_json(raw))
    try:
        if (hello.holder_node_id, hello.holder_incarnation) != (me.node_id, me.incarnation):
            raise StaleHandleError(
                f"this is {me.node_id} in incarnation {me.incarnation}, not {hello.holder_node_id} in "
                f"{hello.holder_incarnation}: the handles are void"
            )
        me.layout.require_same(hello.holder_layout)
        Reslice(hello.layout, me.layout)
        if hello.transport not in transports:
            raise TransferFailedError(f"{me.node_id} does not offer {hello.transport} here")
    except BiphaseError as error:
        _refuse(sock, error, deadline)
        raise
    said = {
        "node_id": me.node_id,
        "incarnation": me.incarnation,
        "num_blocks": welcome.num_blocks,
        "batch_blocks": welcome.batch_blocks,
        **mac,
    }
    sock.send_bytes(frames.pack_json(Kind.WELCOME, said), deadline)
    return hello


def _challenge(sock: DeadlineSocket, hello: bytes, token: ServiceToken, deadline: float) -> str:
    """Lets the reader prove that it has the token. Returns the holder's own proof.

    Raises:
        UnauthorizedError: it does not.
    """
    challenge = secrets.token_bytes(_NONCE_BYTES)
    sock.send_bytes(_pack(Kind.CHALLENGE, challenge), deadline)
    kind, proof = sock.recv_frame(deadline, _MAC_BYTES)
    if kind is not Kind.PROOF or not hmac.compare_digest(proof, token.mac(b"reader", hello, challenge)):
        refusal = UnauthorizedError("the reader does not show that it has the service token of this cluster")
        _refuse(sock, refusal, deadline)
        raise refusal
    return token.mac(b"holder", hello, challenge).hex()


def _refuse(sock: DeadlineSocket, error: BiphaseError, deadline: float) -> None:
    sock.send_bytes(frames.pack_json(Kind.REFUSE, {"code": error.code.value, "message": error.message}), deadline)


def _pack(kind: Kind, body: bytes) -> bytes:
    return frames.pack_header(kind, len(body)) + body


def _parse_hello(body: dict[str, object]) -> Hello:
    layout, holder_layout = _layout_field(body, "layout"), _layout_field(body, "holder_layout")
    return Hello(
        node_id=frames.text_field(body, "node_id"),
        incarnation=frames.text_field(body, "incarnation"),
        holder_node_id=frames.text_field(body, "holder_node_id"),
        holder_incarnation=frames.text_field(body, "holder_incarnation"),
        layout=layout,
        holder_layout=holder_layout,
        transport=frames.text_field(body, "transport"),
    )


def _layout_field(body: dict[str, object], name: str) -> KVLayout:
    layout = body.get(name)
    if not isinstance(layout, dict):
        raise FrameError(f"handshake field {name} is missing")
    try:
        return KVLayout.from_json(layout)
    except ValueError as error:
        raise FrameError(f"handshake: {error}") from error
