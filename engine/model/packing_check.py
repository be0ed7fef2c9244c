"""Checks that a model computes the same in packed steps as for each sequence by itself, and refuses it otherwise."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from engine.attention.interface import NO_SOFTCAP, attach
from engine.batch.input_batch import InputBatch, ScheduledSequence, StepKind, StepSequences, pack
from engine.kv_cache.storage import KVStorage
from engine.model.checkpoint_audit import DOWNLOAD
from engine.model.compatibility import PROBE_TOKENS, LayerCall, ProbedModel, UnsupportedModel, attention_of
from engine.model.lm_head import HeadSpec, full_rows, hidden_rows, output_rows
from engine.model.model_folder import BadCheckpoint
from engine.requests import Int32s

REFERENCE = "eager"  # the only attention of transformers that keeps soft caps and sinks
LONGEST_CHECK = {"cpu": 1024, "cuda": 8192}  # tokens: the reference keeps a score for every pair of them
NEIGHBOUR = 3  # tokens of a sequence that follows others: no window hides those from it
COMPARED_ROWS = 24  # of a sequence, the last ones, which a window or a neighbour would change
EXACT_TOLERANCE = 1e-4  # of the row's largest |logit|, in float32
HALF_TOLERANCE = 5e-2  # the same in half precision, where routing may flip in a few rows: hence the quantile
HALF_QUANTILE = 0.75
HALF_NOISE = 2.0**-6  # at most, of a number: a few roundings of bfloat16
MAX_TOLERANCE = 0.4


# Head check


def find_head(model: ProbedModel) -> tuple[HeadSpec | None, int]:
    """Returns the head as a matrix, a scale and a soft cap, and V. The head is None where that does not give the
    model's own rows."""
    trial, module = _Trial(model, slots=PROBE_TOKENS + 2), model.module
    ids = np.arange(PROBE_TOKENS, dtype=np.int32)
    run = ScheduledSequence(0, ids[:0], ids + 1, ids, ids)
    own = trial.run(full_rows, StepKind.SCORE, [run]).float()
    head = module.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        return None, own.shape[1]
    hidden = trial.run(hidden_rows, StepKind.SCORE, [run])
    if hidden.shape[1] != head.in_features or own.shape[1] != head.out_features:
        return None, own.shape[1]
    tolerance = EXACT_TOLERANCE if hidden.dtype == torch.float32 else HALF_TOLERANCE
    specs = [
        HeadSpec(weight=head.weight, bias=head.bias, scale=scale, softcap=softcap, divisor=divisor)
        for scale, divisor, softcap in _head_candidates(module.config.get_text_config(decoder=True))
    ]
    # Rounded as the model rounds: beside exact columns its own rounding hides a soft cap that small logits hardly feel.
    errors = [float((spec.rows(hidden).float() - own).abs().max()) for spec in specs]
    best = int(np.argmin(errors))
    equal = errors[best] <= tolerance * float(own.abs().max())
    return specs[best] if equal else None, own.shape[1]


def _head_candidates(config: Any) -> list[tuple[float, float | None, float]]:
    """Returns the (scale, divisor, soft cap) that a configuration may mean; `find_head` measures which one holds."""
    scales: list[tuple[float, float | None]] = [(1.0, None)]
    if getattr(config, "logit_scale", None):
        scales.append((float(config.logit_scale), None))
    if getattr(config, "logits_scaling", None):
        scaling = float(config.logits_scaling)
        scales += [(1 / scaling, scaling), (scaling, None)]
    caps = [NO_SOFTCAP]
    if getattr(config, "final_logit_softcapping", None):
        caps.append(float(config.final_logit_softcapping))
    return [(scale, divisor, cap) for scale, divisor in scales for cap in caps]


# Packing check


class _Trial:
    """Runs steps over a small KV storage full of NaN, which is attached to the model until the real one is."""

    def __init__(self, model: ProbedModel, slots: int) -> None:
        module = model.module
        self._model, storage = model, KVStorage(model.shapes, slots, module.dtype, module.device, fill=float("nan"))
        attach(model.attentions, storage.keys, storage.values)
        self.token_table = torch.zeros((3, slots), dtype=torch.int32, device=module.device)

    def run(
        self,
        rows: Callable[[nn.Module, Any, InputBatch], torch.Tensor],
        kind: StepKind,
        sequences: StepSequences,
    ) -> torch.Tensor:
        with torch.no_grad():
            batch = pack(kind, sequences, self.token_table, self._model.module.device)
            return rows(self._model.module, self._model.backend.plan(batch), batch)


class _Part(NamedTuple):
    """Names the new tokens [first, last) of one sequence in one step."""

    sequence: int
    first: int
    last: int


class PackingCheck:
    """Compares packed steps with the library's own attention and positions over each sequence by itself.

    Two sequences share a prefix and a third is short; they are packed, chunked and decoded over scattered slots of a
    storage full of NaN. The reference rows are computed once, when this is made: a model that is changed afterwards
    must still give them.
    """

    def __init__(self, model: ProbedModel, *, max_model_len: int, seed: int = 0) -> None:
        """`max_model_len` bounds the checked sequences; their tokens are drawn by `seed`."""
        self._model, module = model, model.module
        rng = np.random.default_rng(seed)
        self._lengths = _check_lengths(model.calls, max_model_len, module.device.type)
        vocab = module.config.get_text_config(decoder=True).vocab_size
        self._ids, self._slots = sequences_of(self._lengths, vocab, rng)
        with attention_of(module, REFERENCE):
            self._reference = [_reference_rows(module, one) for one in self._ids]
            _check_finite(model.architecture, module, self._reference)
            _check_positions(model.architecture, module, self._ids[-1], self._reference[-1])
            self._tolerance = _tolerance(module, self._ids[0], self._reference[0])

    def run(self) -> float:
        """Runs the check; returns the largest difference, as a part of the largest |logit|.

        Raises:
            UnsupportedModel: The difference is too large.
        """
        trial = _Trial(self._model, slots=sum(map(len, self._ids)) + 1)
        worst = 0.0
        for kind, parts in _check_steps(*self._lengths):
            sequences = [_run(part, kind, self._slots, self._ids, trial.token_table) for part in parts]
            rows = trial.run(output_rows, kind, sequences).float()
            for part, run in zip(parts, sequences, strict=True):
                got, rows = rows[: len(run.rows)], rows[len(run.rows) :]
                at = torch.from_numpy(part.first + run.rows).long().to(rows.device)
                difference = _difference(got, self._reference[part.sequence][at].float(), self._model.module.dtype)
                worst = float(np.maximum(worst, difference))  # keeps a NaN, which max would drop
        if not worst <= self._tolerance:  # NaN is neither
            raise UnsupportedModel(
                self._model.architecture,
                f"packed steps change its rows by {worst:.2g} of the largest one (allowed: {self._tolerance:.2g}): "
                "requests would see each other, or its attention has a rule that this engine does not know",
            )
        return worst

    def compare_bits(self) -> None:
        """Compares packed steps with each sequence in a step of its own, bit by bit.

        Raises:
            UnsupportedModel: A row's bits depend on its step.
        """
        trial = _Trial(self._model, slots=sum(map(len, self._ids)) + 1)

        def rows(kind: StepKind, sequences: StepSequences, token_table: torch.Tensor) -> torch.Tensor:
            return trial.run(output_rows, kind, sequences)

        compare_bits(self._model.architecture, rows, self._lengths, self._ids, self._slots, trial.token_table)


def compare_bits(
    architecture: str,
    rows: Callable[[StepKind, StepSequences, torch.Tensor], torch.Tensor],
    lengths: tuple[int, int, int],
    ids: Sequence[Int32s],
    slots: Sequence[Int32s],
    token_table: torch.Tensor,
) -> None:
    """Compares packed steps with each sequence in a step of its own, bit by bit.

    Args:
        architecture: Named by a refusal.
        rows: Returns the wanted rows of a step.
        lengths: The first sequence's, the second's, and that of what they share.
        ids: The tokens of each sequence.
        slots: Where their keys and values go; the second sequence begins with slots of the first.
        token_table: i32 [3, longest] on the device, written.

    Raises:
        UnsupportedModel: A row's bits depend on its step.
    """
    own = []
    for one, places in zip(ids, slots, strict=True):
        every = np.arange(len(one), dtype=np.int32)
        step = [ScheduledSequence(0, places[:0], places, one, every)]
        own.append(rows(StepKind.SCORE, step, token_table).clone())
    for kind, parts in _check_steps(*lengths):
        sequences = [_run(part, kind, slots, ids, token_table) for part in parts]
        together = rows(kind, sequences, token_table)
        for part, run in zip(parts, sequences, strict=True):
            got, together = together[: len(run.rows)], together[len(run.rows) :]
            at = torch.from_numpy(part.first + run.rows).long().to(together.device)
            if not torch.equal(got, own[part.sequence][at]):
                raise UnsupportedModel(
                    architecture, "packed steps change the bits of its rows: set `engine.numerics` to fast"
                )


def _check_finite(architecture: str, module: nn.Module, rows: Sequence[torch.Tensor]) -> None:
    """Raises BadCheckpoint, with the weights at fault, where the library's own rows are not finite."""
    if all(bool(one.isfinite().all()) for one in rows):
        return
    names = [name for name, weight in module.named_parameters() if not bool(weight.isfinite().all())]
    if names:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        raise BadCheckpoint(f"`{architecture}`: {names[0]}{more} has values that are not finite. {DOWNLOAD}")
    raise BadCheckpoint(
        f"`{architecture}`: its output is not finite in {module.dtype}, though its weights are: set `model.dtype` to "
        "one with a wider range."
    )


def sequences_of(
    lengths: tuple[int, int, int], vocab_size: int, rng: np.random.Generator
) -> tuple[list[Int32s], list[Int32s]]:
    """Returns the tokens and the scattered slots of two sequences that share a prefix and of a short third one.

    Args:
        lengths: The first sequence's, the second's, and that of what they share.
        vocab_size: The model's.
        rng: Draws both.
    """
    longest, shortest, shared = lengths
    sizes = (longest, shortest, NEIGHBOUR)
    ids = [rng.integers(0, vocab_size, size).astype(np.int32) for size in sizes]
    order = rng.permutation(np.arange(1, sum(sizes) + 1)).astype(np.int32)
    slots = np.split(order, np.cumsum(sizes)[:-1])
    for array in (ids, slots):
        array[1][:shared] = array[0][:shared]
    return ids, slots


def _check_lengths(calls: Sequence[LayerCall], max_model_len: int, device: str) -> tuple[int, int, int]:
    """Returns the lengths of the longer sequence, the shorter one and their common prefix; the longer one exceeds the
    largest window where memory allows."""
    window = max(call.window for call in calls)
    longest = max(3, min(max(41, window + 2 * COMPARED_ROWS), max_model_len, LONGEST_CHECK.get(device, 1024)))
    shortest = max(3, longest * 3 // 4)
    return longest, shortest, shortest // 3


def _check_steps(longest: int, shortest: int, shared: int) -> list[tuple[StepKind, list[_Part]]]:
    """Returns three steps: a prefix with a sequence that continues it; a later chunk, a sequence over the same prefix
    and a new one; a decode step."""
    middle = max(shared, longest // 2)
    chunks = [_Part(0, 0, shared), _Part(0, shared, middle)]
    later = [_Part(0, middle, longest - 1), _Part(1, shared, shortest - 1), _Part(2, 0, NEIGHBOUR)]
    last = [_Part(0, longest - 1, longest), _Part(1, shortest - 1, shortest)]
    steps = [(StepKind.PREFILL, chunks), (StepKind.SCORE, later), (StepKind.DECODE, last)]
    return [(kind, [part for part in parts if part.first < part.last]) for kind, parts in steps]


def _run(
    part: _Part, kind: StepKind, slots: Sequence[Int32s], ids: Sequence[Int32s], token_table: torch.Tensor
) -> ScheduledSequence:
    index, first, last = part
    rows = np.arange(max(0, last - first - COMPARED_ROWS), last - first, dtype=np.int32)
    new: Int32s | None = ids[index][first:last]
    if kind is StepKind.DECODE:
        token_table[index, first] = int(ids[index][first])
        new = None
    return ScheduledSequence(index, slots[index][:first], slots[index][first:last], new, rows)


def _check_positions(architecture: str, module: nn.Module, ids: Int32s, reference: torch.Tensor) -> None:
    """Raises UnsupportedModel where the library's own positions over `ids` are not 0, 1, 2..., as packed steps have."""
    counted = _reference_rows(module, ids, positions=torch.arange(len(ids), device=reference.device)).float()
    wanted = reference.float()
    difference = float((counted - wanted).abs().max() / wanted.abs().max())
    allowed = EXACT_TOLERANCE if reference.dtype == torch.float32 else HALF_NOISE
    if not difference <= allowed:  # NaN is neither
        raise UnsupportedModel(
            architecture,
            f"positions that begin at 0, as packed steps have, change its rows by {difference:.2g} of the largest one "
            f"(allowed: {allowed:.2g}): the library gives its tokens other positions, such as from pad_token_id + 1 on",
        )


def _reference_rows(
    module: Any, ids: Int32s, *, noise: float = 0.0, positions: torch.Tensor | None = None
) -> torch.Tensor:
    """Returns the model's `output_rows` over `ids` by themselves.

    Args:
        module: The model.
        ids: The tokens.
        noise: Part by which the embeddings are changed.
        positions: Those of the tokens; None: the library chooses them.
    """
    tokens = torch.from_numpy(ids).long().to(module.device)[None]
    given: dict[str, torch.Tensor] = {"input_ids": tokens}
    with torch.no_grad():
        if noise:
            embedded = module.get_input_embeddings()(tokens)
            ripple = torch.linspace(-noise, noise, embedded.shape[-1], device=embedded.device).to(embedded.dtype)
            given = {"inputs_embeds": embedded * (1 + ripple)}
        if positions is not None:
            given["position_ids"] = positions[None]
        out = module(**given, use_cache=False)
    rows: torch.Tensor = (out.last_hidden_state if module.base_model is module else out.logits)[0]
    return rows


def _tolerance(module: Any, ids: Int32s, reference: torch.Tensor) -> float:
    """Returns how far packed rows may be off.

    In half precision a rounding error may route a token to other experts. So the rows may differ by what a change of
    the embeddings in the last bit or two makes of them, up to a bound below what wrong attention makes.
    """
    if module.dtype == torch.float32:
        return EXACT_TOLERANCE
    changed = _reference_rows(module, ids, noise=HALF_NOISE)[-COMPARED_ROWS:].float()
    own = _difference(changed, reference[-COMPARED_ROWS:].float(), module.dtype)
    return float(np.clip(2 * own, HALF_TOLERANCE, MAX_TOLERANCE))


def _difference(got: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype) -> float:
    """Returns max |difference| of a row over the largest |logit|: the worst row's in float32, else a quantile."""
    rows = (got - wanted).abs().amax(1) / wanted.abs().amax()
    return float(rows.max() if dtype == torch.float32 or rows.isnan().any() else rows.quantile(HALF_QUANTILE))
