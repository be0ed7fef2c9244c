"""Cuts the bytes of a link into frames, and joins a message's parts to a frame.

    magic 2 | version 1 | kind 1 | bytes of the message 4 | bytes of the arrays 4 | message | arrays

Numbers are little-endian. The message is MessagePack; its arrays follow it end to end (`deployments.link.messages`). A
receiver states the largest frame that it takes, and refuses a larger one by its header, before a byte of it is kept.
"""

import struct
from collections.abc import Iterator
from enum import IntEnum
from typing import NamedTuple, NoReturn

HEADER = struct.Struct("<2sBBII")
MAGIC = b"AL"
VERSION = 3
MAX_FRAME_BYTES = 64 << 20
MAX_HANDSHAKE_BYTES = 1024


class FrameKind(IntEnum):
    """Names the message of a frame."""

    HELLO = 1  # server: its nonce
    PROOF = 2  # client: its nonce and proof
    WELCOME = 3  # server: its proof
    SCORE = 4  # client: a call
    LIKELIHOOD = 5
    GENERATE = 6
    CANCEL = 7  # client: a call that it no longer waits for
    RESULTS = 8  # server: whatever there is for the calls of this link
    POOLING = 9  # client: a call


KINDS = {int(kind): kind for kind in FrameKind}


class FrameError(ValueError):
    """Reports bytes that are no frame, or a frame that holds no message of its kind. The link must be closed."""


class LinkFrame(NamedTuple):
    """Holds one frame as it came, in memory of its own that may be written to."""

    kind: FrameKind
    message: bytearray
    arrays: bytearray


def encode_frame(kind: FrameKind, message: bytes, arrays: bytes = b"") -> bytes:
    """Returns the bytes of a frame.

    Raises:
        FrameError: it would be larger than MAX_FRAME_BYTES.
    """
    if HEADER.size + len(message) + len(arrays) > MAX_FRAME_BYTES:
        raise FrameError(
            f"A frame must be at most {MAX_FRAME_BYTES} bytes. Given: {HEADER.size + len(message) + len(arrays)}."
        )
    return b"".join((HEADER.pack(MAGIC, VERSION, kind, len(message), len(arrays)), message, arrays))


class FrameReader:
    """Collects bytes and gives the frames that are complete. It holds at most one frame and what was fed last."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes  # of a frame; the handshake allows less than what follows it
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[LinkFrame]:
        """Takes bytes and yields each complete frame.

        Raises:
            FrameError: the bytes are no frame, or it is too large.
        """
        buffer = self._buffer
        buffer += data
        start, fed = 0, len(buffer)
        try:
            while fed - start >= HEADER.size:
                kind, message_bytes, array_bytes = self._header(start)
                message_start = start + HEADER.size
                arrays_start = message_start + message_bytes
                end = arrays_start + array_bytes
                if fed < end:
                    return
                start = end
                yield LinkFrame(kind, buffer[message_start:arrays_start], buffer[arrays_start:end])
        finally:
            del buffer[:start]

    def _header(self, start: int) -> tuple[FrameKind, int, int]:
        magic, version, kind, message_bytes, array_bytes = HEADER.unpack_from(self._buffer, start)
        if magic != MAGIC:
            raise FrameError("A frame must begin with the link's magic bytes.")
        if version != VERSION:
            raise FrameError(f"The link's version must be {VERSION}. Given: {version}.")
        known = KINDS.get(kind)
        if known is None:
            raise FrameError(f"The kind of a frame must be one of {sorted(KINDS)}. Given: {kind}.")
        size = HEADER.size + message_bytes + array_bytes
        if size > self.max_bytes:
            raise FrameError(f"A frame must be at most {self.max_bytes} bytes. Given: {size}.")
        return known, message_bytes, array_bytes


def refuse(frame: LinkFrame) -> NoReturn:
    """Raises FrameError for a frame whose kind must not come now."""
    raise FrameError(f"A frame of this kind must not come now. Given: {frame.kind.name}.")
