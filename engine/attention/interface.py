"""Defines the attention function that Hugging Face models call, and the torch op behind it.

A model's attention layer calls `attend`. The op writes the new keys and values to the KV storage and attends by the
plan of the step that the thread runs: `forward_context` says which step that is. `AttentionBackend` makes such plans:
`engine.attention.torch_backend` on the CPU, `engine.attention.flashinfer_backend` on CUDA.

Shape legend: T packed tokens, H query heads, G key/value heads, D query/key dim, E value dim.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import torch
from torch import nn

from engine.batch.input_batch import InputBatch
from engine.utils.torch_ops import operation

ATTENTION = "assay_paged"  # transformers has no mask function of this name, so that it builds no mask
NO_WINDOW = -1
NO_SOFTCAP = 0.0


class AttentionCall(NamedTuple):
    """Holds the arguments of one layer's attention over the packed tokens of a step.

    scores = cap(scale q k^T),  cap(z) = softcap tanh(z / softcap), or z without a soft cap
    out = softmax([scores, sinks]) v,  a sink taking weight and giving no value
    """

    q_THD: torch.Tensor  # queries of the new tokens, in the model's dtype
    k_TGD: torch.Tensor  # keys of the new tokens
    v_TGE: torch.Tensor  # values of the new tokens
    keys: torch.Tensor  # [slots, 1, G, D or more] the layer's KV storage, which the call writes to
    values: torch.Tensor  # [slots, 1, G, E or more]
    scale: float
    window: int = NO_WINDOW  # tokens that a token sees, itself included
    softcap: float = NO_SOFTCAP
    sinks: torch.Tensor | None = None  # [H] logits


OtherFields = tuple[torch.Tensor, torch.Tensor, float, int, float, torch.Tensor | None]  # those after q, k and v


class AttentionStep(Protocol):
    """Attends in every layer of one planned step. The thread that runs the step calls it once a layer."""

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """Writes the new keys and values to the step's slots, then attends.

        Returns:
            [T, H, E] in q's dtype, contiguous.
        """
        ...


class AttentionBackend(Protocol):
    """Plans attention on one class of device."""

    min_cascade_context: int | None  # tokens of a context in two levels; None: `shared_prefix.MIN_SHARED_CONTEXT`
    cascade_ratio: float | None  # context tokens a new token from which two levels win (`InputBatch.cascade`); or never

    def stored_dims(self, key_dim: int, value_dim: int) -> tuple[int, int]:
        """Returns the head dims that the KV storage holds, padding included.

        Raises:
            ValueError: The device's attention takes no heads of these dims.
        """
        ...

    def plan(self, batch: InputBatch) -> AttentionStep: ...


class _ForwardContext(threading.local):
    """Holds the step that a thread runs. Some models drop arguments that they do not know, and a torch op takes no
    Python objects, so that the step cannot be an argument."""

    step: AttentionStep | None = None
    wanted: torch.Tensor | None = None


_context = _ForwardContext()


@contextmanager
def forward_context(step: AttentionStep, wanted: torch.Tensor | None = None) -> Iterator[None]:
    """Makes `step` the one that the model's layers attend in, on this thread.

    Args:
        step: The planned step.
        wanted: i64 [R], the tokens whose output of the last layer is read. None: all.
    """
    before = _context.step, _context.wanted
    _context.step, _context.wanted = step, wanted
    try:
        yield
    finally:
        _context.step, _context.wanted = before


def current_step() -> AttentionStep:
    """Returns the step that this thread runs.

    Raises:
        RuntimeError: It runs none.
    """
    if _context.step is None:
        raise RuntimeError("The model was called outside of a step: `forward_context(step)` must be around the call.")
    return _context.step


def wanted_rows() -> torch.Tensor | None:
    """Returns the wanted rows, i64 [R], of the step that this thread runs; None for all."""
    return _context.wanted


def _output_shape(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: object) -> torch.Tensor:
    return q.new_empty((1, q.shape[2], q.shape[1], v.shape[3]))


@operation(
    "attend(Tensor q, Tensor k, Tensor v, Tensor(a!) keys, Tensor(b!) values, float scale, int window, float softcap, "
    "Tensor? sinks) -> Tensor",
    _output_shape,
)
def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *others: *OtherFields) -> torch.Tensor:
    """Takes q (1, H, T, D), k (1, G, T, D), v (1, G, T, E) and the other fields of an `AttentionCall`. (1, T, H, E)."""
    q_THD, k_TGD, v_TGE = (tensor[0].transpose(0, 1) for tensor in (q, k, v))
    return current_step().attend(AttentionCall(q_THD, k_TGD, v_TGE, *others)).unsqueeze(0)


def attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """Attends in one layer: transformers calls it as the model's attention function.

    The layer's KV storage is an attribute of its attention module (`attach`). An index as an argument would make the
    compiler specialise every layer.

    Args:
        module: The layer's attention module.
        query: (1, H, T, D), after norm and rotary embedding.
        key: (1, G, T, D).
        value: (1, G, T, E).
        attention_mask: Ignored: the step knows what each token sees.
        scaling: None: 1 / sqrt(D).
        sliding_window: Tokens that a token sees, itself included. None: all before it.
        softcap: None or 0: no soft cap.
        s_aux: [H], the logits of attention sinks.

    Returns:
        (1, T, H, E), and no weights.
    """
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    window = NO_WINDOW if sliding_window is None else sliding_window
    cap = NO_SOFTCAP if softcap is None else softcap
    keys, values = module.assay_keys, module.assay_values
    return torch.ops.assay.attend(query, key, value, keys, values, scale, window, cap, s_aux), None


def attach(modules: list[nn.Module], keys: list[torch.Tensor], values: list[torch.Tensor]) -> None:
    """Gives every attention module, in layer order, its tensors of the KV storage."""
    for module, key, value in zip(modules, keys, values, strict=True):
        module.assay_keys, module.assay_values = key, value
