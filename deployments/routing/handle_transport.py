"""Carries calls over Serve's handle: one message of Ray's for each call and for each reply of a stream.

It works wherever Serve does, on any number of nodes, and is what the link falls back to.
"""

from typing import Any

from deployments.protocol import AnyCall, GenerateCall, PendingReply, ReplyStream, Route, RowsCall
from engine.requests import PoolingRequest, ScoreRequest


class HandleTransport:
    """Implements `ReplicaTransport`. Serve's router sends each call where its route says."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle
        self._stream = handle.options(stream=True).stream

    def call(self, call: AnyCall, route: Route, epoch: int = 0) -> PendingReply:
        found: PendingReply
        if isinstance(call, tuple):
            found = self._handle.generate.remote(call, epoch, route=route)
        elif isinstance(call, ScoreRequest):
            found = self._handle.score.remote(call, route=route)
        elif isinstance(call, PoolingRequest):
            found = self._handle.pooling.remote(call, route=route)
        else:
            found = self._handle.likelihood.remote(call, route=route)
        return found

    def batch(self, requests: tuple[RowsCall, ...], route: Route) -> PendingReply:
        found: PendingReply = self._handle.score_batch.remote(requests, route=route)
        return found

    def stream(self, call: GenerateCall, route: Route, epoch: int) -> ReplyStream:
        found: ReplyStream = self._stream.remote(call, epoch, route=route)
        return found

    def is_direct(self, replica: str) -> bool:
        return False

    async def card(self) -> object:
        found: object = await self._handle.card.remote()
        return found
