"""Runs a model's base, which is all of it but the head, as the straight line of operations that a small step makes.

On a CPU a step of few tokens is some two hundred small operations, and calling the library's modules around them takes
a quarter of its time. torch's compiler front end follows one step through those modules and writes the operations down;
they run again without the modules, for any number of tokens. Nothing is compiled, so that no C++ compiler is needed and
every number has the same bits. Switch: `engine.trace_base`.

A model that cannot be followed, since its code looks at numbers or breaks off, runs its modules as before. So does one
whose traced steps differ in any bit when they are tried.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from engine.attention.interface import AttentionBackend, AttentionStep, forward_context
from engine.batch.input_batch import MIN_TOKENS, InputBatch, ScheduledSequence, StepKind, pack
from engine.model.lm_head import hidden_rows

log = logging.getLogger(__name__)

MAX_TOKENS = 128  # of a traced step: in larger ones the operations take most of the time
TRIED_TOKENS = (MIN_TOKENS, 3, 61, MAX_TOKENS)
MAX_REASON_CHARS = 300  # of the front end's message in the log


class _Operations(NamedTuple):
    """Holds what a step was seen to do."""

    run: Callable[..., tuple[torch.Tensor, ...]]
    arguments: tuple[Any, ...]  # of the step that was followed: parameters, KV storage and the step's own
    results: tuple[torch.Tensor, ...]  # of that step


class TracedBase:
    """Runs steps of up to `max_tokens` tokens of a base."""

    def __init__(self, operations: _Operations, ids: torch.Tensor, positions: torch.Tensor, max_tokens: int) -> None:
        """
        Args:
            operations: Those of a step of these tokens.
            ids: i64 [1, T].
            positions: i64 [1, T].
            max_tokens: Tokens of the largest step.
        """
        self.max_tokens = max_tokens
        self._run, self._arguments = operations.run, list(operations.arguments)
        places = list(enumerate(self._arguments))
        self._ids = [place for place, value in places if value is ids]
        self._positions = [place for place, value in places if value is positions]
        self._sizes = [place for place, value in places if isinstance(value, int)]  # no other integer is symbolic

    def rows(self, step: AttentionStep, batch: InputBatch) -> torch.Tensor:
        """Returns the rows [R, H] that the head reads, as `hidden_rows` does."""
        arguments = self._arguments.copy()
        for places, value in (
            (self._ids, batch.ids[None]),
            (self._positions, batch.positions[None]),
            (self._sizes, batch.num_tokens),
        ):
            for place in places:
                arguments[place] = value
        with forward_context(step, batch.keep_rows):
            (hidden,) = self._run(*arguments)
        return hidden[0, batch.keep_rows]


def trace_base(
    module: Any, backend: AttentionBackend, *, longest: int, slots: int, vocab_size: int
) -> TracedBase | None:
    """Follows a step through a model, and tries what it has found.

    It writes to the first slots of the KV storage, which nothing may be using.

    Args:
        module: The model, with its KV storage.
        backend: Computes attention.
        longest: Tokens of a sequence at most.
        slots: Slots of the storage, the padding slot included.
        vocab_size: Ids that the model takes.

    Returns:
        The traced base; None where the model's own modules have to run.
    """
    largest = min(MAX_TOKENS, longest, slots - 1)
    if largest < MIN_TOKENS:
        return None
    steps = [_step(size, vocab_size, module.device) for size in sorted({min(size, largest) for size in TRIED_TOKENS})]
    try:
        traced = _traced(module.base_model, backend, steps[-1], largest)
        differ = [batch.num_tokens for batch in steps if not _same(traced, module, backend, batch)]
    except Exception as error:
        reason = str(error).strip().partition("\n")[0][:MAX_REASON_CHARS]
        log.info("The model's modules run as they are, since a step could not be followed: %s", reason)
        return None
    if differ:
        log.warning("The model's modules run as they are, since traced steps of %s tokens differ.", differ)
        return None
    return traced


def _same(traced: TracedBase, module: Any, backend: AttentionBackend, batch: InputBatch) -> bool:
    own = hidden_rows(module, backend.plan(batch), batch)
    return torch.equal(traced.rows(backend.plan(batch), batch), own)


def _traced(base: nn.Module, backend: AttentionBackend, batch: InputBatch, max_tokens: int) -> TracedBase:
    """Raises one of many errors of the front end where the base cannot be followed."""
    found: list[_Operations] = []

    def keep(graph: Any, _: Sequence[Any]) -> Callable[..., Any]:
        def first(*arguments: Any) -> Any:
            found.append(_Operations(graph.forward, arguments, graph.forward(*arguments)))
            return found[-1].results

        return first

    def follow(ids: torch.Tensor, positions: torch.Tensor) -> Any:
        # without the base's own hooks, which time it
        return base.forward(input_ids=ids, position_ids=positions, use_cache=False).last_hidden_state

    dynamo: Any = torch._dynamo
    ids, positions = batch.ids[None].clone(), batch.positions[None].clone()
    for tensor in (ids, positions):
        dynamo.mark_dynamic(tensor, 1)
    try:
        # By default sizes that differ from those of a model before it would be symbols, too, and so would constants.
        constants = dynamo.config.patch(specialize_float=True, automatic_dynamic_shapes=False)
        with forward_context(backend.plan(batch), batch.keep_rows), constants:
            hidden = torch.compile(follow, fullgraph=True, backend=keep)(ids, positions)
    finally:
        dynamo.reset_code(follow.__code__)  # else the code of one model would count for the next
    (operations,) = found
    sizes = [value for value in operations.arguments if isinstance(value, int)]
    if any(size != batch.num_tokens for size in sizes):
        raise ValueError(f"it depends on other sizes than the step's: {sizes}")
    if len(operations.results) != 1 or hidden.shape[:2] != ids.shape:
        raise ValueError("it has other results than one row for each token")
    return TracedBase(operations, ids, positions, max_tokens)


def _step(tokens: int, vocab_size: int, device: torch.device) -> InputBatch:
    """Returns a step of one sequence, half of whose rows the head reads."""
    ids = np.arange(tokens, dtype=np.int32) * 7 % vocab_size
    slots = np.arange(1, tokens + 1, dtype=np.int32)
    rows = np.arange(tokens % 2, tokens, 2, dtype=np.int32)
    table = torch.zeros((1, 1), dtype=torch.int32, device=device)
    return pack(StepKind.PREFILL, [ScheduledSequence(0, slots[:0], slots, ids, rows)], table, device)
