"""Has the kernel notice that the host at the other end of a link is gone."""

import asyncio
import socket


def keep_alive(transport: asyncio.BaseTransport) -> None:
    """Ends a connection over TCP some 6 s after its other host is gone: silence alone is no sign. Both ends call it."""
    own = transport.get_extra_info("socket")
    if own is None or own.family == socket.AF_UNIX:
        return
    own.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 2), ("TCP_KEEPINTVL", 1), ("TCP_KEEPCNT", 4), ("TCP_USER_TIMEOUT", 6000)):
        if hasattr(socket, name):
            own.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
