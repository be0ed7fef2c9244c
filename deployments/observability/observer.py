"""Defines what the HTTP layer reports while it serves requests, so that it needs no metrics library."""

from typing import Literal

import numpy as np
import numpy.typing as npt

from deployments.auth.authenticator import Reason

Stage = Literal["parse", "tokenize", "admit", "route", "queue", "prefill", "head", "decode", "gather", "encode"]
Phase = Literal["queued", "prefill", "stream", "last"]


class Observer:
    """Ignores every report; subclasses count them. Its methods run on the event loop and must not block.

    `route` is a declared path or "other", never text from the client.
    """

    def request_started(self, body_bytes: int) -> None:
        """Reports the first byte of a request."""

    def request_ended(self, route: str, status: int, code: str, seconds: float, body_bytes: int) -> None:
        """Reports an answer. `code` is an error code or ""; status 499 is a client that disconnected."""

    def body(self, change: int) -> None:
        """Reports bytes of bodies that were read (positive) or freed (negative)."""

    def stage(self, stage: Stage, seconds: float) -> None:
        """Reports the time of one part of a request."""

    def first_token(self, route: str, seconds: float) -> None:
        """Reports the time to a request's first token."""

    def token_gap(self, route: str, seconds: float) -> None:
        """Reports the mean time between a request's tokens, once, at its end."""

    def streams(self, change: Literal[1, -1]) -> None:
        """Reports a stream that opens or closes."""

    def disconnected(self, phase: Phase) -> None:
        """Reports a client that disconnected before its answer was complete."""

    def items(self, route: str, count: int, truncated: int) -> None:
        """Reports how many items were scored, and how many of them were truncated."""

    def label_mass(self, route: str, masses: npt.NDArray[np.floating]) -> None:
        """Reports the probability of all labels together, [N], finite, for each scored item."""

    def auth_failed(self, reason: Reason) -> None:
        """Reports a request without a valid key."""
