"""Defines what plans of paged attention are made of: layer parameters, sequences, and the buffers of captured steps."""

from collections.abc import Iterable
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch

from engine.attention.interface import NO_WINDOW, AttentionBackend, AttentionCall


class AttentionParams(NamedTuple):
    """Holds what a plan depends on beside the sequences: layers with equal parameters share a plan."""

    heads: int
    kv_heads: int
    dim: int  # the stored head dim
    window: int  # as in `AttentionCall`
    softcap: float
    scale: float

    @classmethod
    def of(cls, call: AttentionCall) -> "AttentionParams":
        heads, kv_heads, dim = call.q_THD.shape[1], call.k_TGD.shape[1], call.keys.shape[3]
        return cls(heads, kv_heads, dim, call.window, call.softcap, call.scale)

    @property
    def window_left(self) -> int:
        """The window as FlashInfer counts it: tokens left of a token, without the token; -1 for all."""
        return self.window - 1 if self.window != NO_WINDOW else -1


class Sequences(NamedTuple):
    """Holds what is planned for: S sequences of new tokens, and the storage slots that each attends to."""

    qo_indptr: torch.Tensor  # i32 [S + 1] on the host
    kv_indptr: torch.Tensor  # i32 [S + 1] on the host
    kv_indices: torch.Tensor  # i32 on the device
    causal: bool  # the new tokens are the last of what their sequence attends to


class GraphBuffers(NamedTuple):
    """Holds the plans of captured steps. All row counts share them, since steps run one after another."""

    indptr: torch.Tensor  # i32 [max rows + 1]
    indices: torch.Tensor  # i32 [max attended tokens]
    last_page: torch.Tensor  # i32 [max rows]
    staging: int | None = None  # bytes that a plan may take, on the device and again on the host; None: 8 MiB

    @classmethod
    def of(cls, rows: int, attended: int, device: torch.device, staging: int | None = None) -> "GraphBuffers":
        ints = partial(torch.zeros, dtype=torch.int32, device=device)
        return cls(ints(rows + 1), ints(max(attended, rows)), ints(rows).fill_(1), staging)


class CapturableBackend(AttentionBackend, Protocol):
    """Plans attention that CUDA graphs can capture."""

    device: torch.device

    def rotated_together(self, tokens: int) -> int:
        """Returns how many tokens one program of `engine.kernels.qk_norm_rope` computes in a step of `tokens`."""
        ...

    def append(
        self, k: torch.Tensor, v: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor
    ) -> None:
        """Writes k and v [T, G, D] to `slots`, i32 [T]."""
        ...

    def graph_decoder(
        self, params: "AttentionParams", buffers: "GraphBuffers", rows: int, longest: int
    ) -> "GraphDecoder":
        """Makes what attends in a captured step of single tokens, by a plan in `buffers`.

        Args:
            params: The layers' parameters.
            buffers: Where the plan lies.
            rows: The step's row count.
            longest: Tokens that a row may attend to.
        """
        ...

    def graph_bounds(self, layers: "Iterable[AttentionParams]", rows: int, longest: int) -> tuple[int, ...]:
        """Returns the longest contexts of the captured steps of `rows` rows, ascending, the last one being `longest`:
        a step of shorter rows is attended by other kernels."""
        ...

    def graph_sequences(self, params: "AttentionParams", tokens: int) -> int:
        """Returns how many sequences a captured step of `tokens` tokens may have, however these are cut. Below 1 the
        step cannot be captured."""
        ...

    def graph_prefiller(
        self, params: "AttentionParams", buffers: "GraphBuffers", queries: torch.Tensor, tokens: int
    ) -> "GraphDecoder":
        """Makes what attends in a captured step of sequences of any number of tokens; it is never planned again.

        Args:
            params: The layers' parameters.
            buffers: Where the plan lies.
            queries: i32 [S + 1] on the device, where each sequence ends. Sequences may be empty.
            tokens: How many every plan has.
        """
        ...

    def named_by_graph(self, tokens: int) -> object:
        """Returns the arrays that `append` names inside a graph of `tokens` tokens, for its owner to keep."""
        ...


class GraphDecoder(Protocol):
    """Attends in a captured step, by a plan that lies where a replay reads it."""

    run: Any  # called as a FlashInfer wrapper's `run`

    @property
    def can_replan(self) -> bool:
        """Whether `replan` may be called; known after the first `plan`."""
        ...

    def plan(self, params: AttentionParams, sequences: Sequences) -> None:
        """Plans for what each sequence attends to."""
        ...

    def replan(self, kv_indptr: torch.Tensor) -> None:
        """Plans for other lengths, i32 [S + 1] on the host, of as many sequences.

        The buffers must hold all that is attended to already, and the copies of the last plan must have ended.
        """
        ...
