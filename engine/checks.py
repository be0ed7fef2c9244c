"""Asking a model what it does, and refusing one that packed steps would compute silently wrong.

Every refusal names the architecture and the reason. Nothing here trusts a config where the model can be asked.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from engine.attention import ATTENTION, NO_SOFTCAP, NO_WINDOW, AttentionBody, attach
from engine.batch import Batch, Run, StepKind, pack
from engine.heads import HeadSpec, full_rows, hidden_rows
from engine.jobs import Int32s
from engine.kv_pool import KvPool, LayerShape

PROBE = "assay_probe"
REFERENCE = "eager"  # the only one of the library's own that keeps soft caps and sinks
PROBE_TOKENS = 2
LONGEST_CHECK = {"cpu": 1024, "cuda": 8192}  # tokens: the reference keeps a score for every pair of them
ROWS_OF_A_RUN = 24  # compared, the last ones: those that a window or a neighbour would change
EXACT_TOLERANCE = 1e-4  # of the row's largest |logit|, in float32
HALF_TOLERANCE = 5e-2  # the same in half precision, where routing may flip in a few rows: hence the quantile
HALF_QUANTILE = 0.75
SUPPORTED_LAYERS = ("full_attention", "sliding_attention")
ORIGINAL_LENGTH = "original_max_position_embeddings"


class Refused(RuntimeError):
    """The model would be computed wrong, or not at all. `architecture` and `reason` say which and why."""

    def __init__(self, architecture: str, reason: str) -> None:
        super().__init__(architecture, reason)
        self.architecture = architecture
        self.reason = reason

    def __str__(self) -> str:
        return f"`{self.architecture}` is not supported: {self.reason}."


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCall:
    """What one layer asked of attention."""

    module: nn.Module
    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    scale: float
    window: int
    softcap: float
    sinks: bool
    masked: bool


# Rules on the configuration


def refuse_by_config(config: Any, max_model_len: int | None = None) -> None:
    """Raises Refused for what a model library config tells to be wrong under packing."""
    name = str(config.model_type)
    text = config.get_text_config(decoder=True)
    if getattr(config, "is_encoder_decoder", False):
        raise Refused(name, "it is an encoder-decoder model; only decoders are served")
    quantised = getattr(config, "quantization_config", None)
    if quantised is not None:
        method = quantised.get("quant_method") if isinstance(quantised, dict) else quantised.quant_method
        raise Refused(name, f"its weights are quantised ({getattr(method, 'value', method)}); only plain weights are")
    others = sorted(set(getattr(text, "layer_types", None) or ()) - set(SUPPORTED_LAYERS))
    if others:
        raise Refused(name, f"it has layers of type {', '.join(others)}; only {' and '.join(SUPPORTED_LAYERS)} are")
    if getattr(text, "attention_chunk_size", None):
        raise Refused(name, "its attention is chunked (attention_chunk_size), which packed steps would not apply")
    for parameters in _rope_parameters(text):
        _refuse_rope(name, text, parameters, max_model_len)


def _rope_parameters(config: Any) -> Iterator[dict[str, Any]]:
    for field in ("rope_parameters", "rope_scaling"):
        found = getattr(config, field, None)
        if isinstance(found, dict):
            nested = [value for value in found.values() if isinstance(value, dict)]
            yield from nested or [found]  # some models have one set a layer type


def _refuse_rope(name: str, config: Any, parameters: dict[str, Any], max_model_len: int | None) -> None:
    """Both kinds look at the largest position of the whole call: one long neighbour would change another request."""
    kind = parameters.get("rope_type", parameters.get("type"))
    if kind == "dynamic":
        raise Refused(name, "its rotary embedding is dynamic: a long request would change its neighbours")
    if kind == "longrope":
        original = parameters.get(ORIGINAL_LENGTH) or getattr(config, ORIGINAL_LENGTH, None)
        length = max_model_len or config.max_position_embeddings
        if original is None or length > original:
            raise Refused(
                name,
                f"its rotary embedding is longrope, which changes beyond {original} tokens for all requests of a step; "
                f"set `model.max_model_len` to at most {original}. Given: {length}",
            )


# Probe


class _Recorder(threading.local):
    calls: list[LayerCall] | None = None


_recorder = _Recorder()


def record_call(
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
    """Stands for the attention function during the probe: notes what was asked and answers zeros (1, T, H, E)."""
    if _recorder.calls is not None:
        call = LayerCall(
            module=module,
            heads=query.shape[1],
            kv_heads=key.shape[1],
            key_dim=key.shape[3],
            value_dim=value.shape[3],
            scale=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
            window=NO_WINDOW if sliding_window is None else int(sliding_window),
            softcap=NO_SOFTCAP if softcap is None else float(softcap),
            sinks=s_aux is not None,
            masked=attention_mask is not None,
        )
        _recorder.calls.append(call)
    return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None


@contextmanager
def attention_of(module: nn.Module, name: str) -> Iterator[None]:
    """The model's attention is `name` inside, and this engine's afterwards."""
    set_attention(module, name)
    try:
        yield
    finally:
        set_attention(module, ATTENTION)


def set_attention(module: Any, name: str) -> None:
    module.set_attn_implementation(name)


def probe(module: Any, architecture: str) -> list[LayerCall]:
    """One call a layer, in layer order. Raises Refused where attention is not one call of each layer."""
    calls: list[LayerCall] = []
    _recorder.calls = calls
    ids = torch.zeros((1, PROBE_TOKENS), dtype=torch.int64, device=module.device)
    try:
        with attention_of(module, PROBE), torch.no_grad():
            module(input_ids=ids, position_ids=torch.arange(PROBE_TOKENS, device=ids.device)[None], use_cache=False)
    except Exception as error:
        raise Refused(architecture, f"a call with packed tokens failed ({type(error).__name__}: {error})") from error
    finally:
        _recorder.calls = None
    layers = module.config.get_text_config(decoder=True).num_hidden_layers
    if not calls:
        raise Refused(architecture, "its attention does not go through the library's attention interface")
    if [getattr(call.module, "layer_idx", None) for call in calls] != list(range(layers)):
        raise Refused(architecture, f"attention is not one call of each of its {layers} layers ({len(calls)} calls)")
    if any(call.masked for call in calls):
        raise Refused(architecture, "it builds an attention mask of its own, which packed steps would not apply")
    return calls


def stored_shapes(calls: Sequence[LayerCall], body: AttentionBody, architecture: str) -> list[LayerShape]:
    """What the pool keeps a layer. Raises Refused where the device's attention has no such heads."""
    try:
        return [LayerShape(call.kv_heads, *body.stored_dims(call.key_dim, call.value_dim)) for call in calls]
    except ValueError as error:
        raise Refused(architecture, str(error).rstrip(".")) from error


# Head check


def find_head(
    module: Any, body: AttentionBody, calls: Sequence[LayerCall], shapes: Sequence[LayerShape]
) -> tuple[HeadSpec | None, int]:
    """The head as a matrix, a scale and a soft cap, or None where that does not give the model's own rows; and V."""
    trial = _Trial(module, body, calls, shapes, slots=PROBE_TOKENS + 2)
    ids = np.arange(PROBE_TOKENS, dtype=np.int32)
    run = Run(0, ids[:0], ids + 1, ids, ids)
    own = trial.run(full_rows, StepKind.SCORE, [run]).float()
    head = module.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        return None, own.shape[1]
    hidden = trial.run(hidden_rows, StepKind.SCORE, [run])
    if hidden.shape[1] != head.in_features or own.shape[1] != head.out_features:
        return None, own.shape[1]
    tolerance = EXACT_TOLERANCE if hidden.dtype == torch.float32 else HALF_TOLERANCE
    every = torch.arange(head.out_features, device=own.device)
    specs = [
        HeadSpec(weight=head.weight, bias=head.bias, scale=scale, softcap=softcap)
        for scale, softcap in _head_candidates(module.config.get_text_config(decoder=True))
    ]
    errors = [float((spec.columns(hidden, every) - own).abs().max()) for spec in specs]
    best = int(np.argmin(errors))
    equal = errors[best] <= tolerance * float(own.abs().max())
    return specs[best] if equal else None, own.shape[1]


def _head_candidates(config: Any) -> list[tuple[float, float]]:
    """(scale, soft cap) that configs speak of; which one holds is measured."""
    scales = [1.0]
    if getattr(config, "logit_scale", None):
        scales.append(float(config.logit_scale))
    if getattr(config, "logits_scaling", None):
        scales += [1 / float(config.logits_scaling), float(config.logits_scaling)]
    caps = [NO_SOFTCAP]
    if getattr(config, "final_logit_softcapping", None):
        caps.append(float(config.final_logit_softcapping))
    return [(scale, cap) for scale in scales for cap in caps]


# Packing check


class _Trial:
    """A small pool full of NaN, attached to the model until the real one is."""

    def __init__(
        self,
        module: Any,
        body: AttentionBody,
        calls: Sequence[LayerCall],
        shapes: Sequence[LayerShape],
        slots: int,
    ) -> None:
        self._module, self._body = module, body
        self._pool = KvPool(shapes, slots, module.dtype, module.device, fill=float("nan"))
        attach([call.module for call in calls], self._pool.keys, self._pool.values)
        self.token_table = torch.zeros((2, slots), dtype=torch.int32, device=module.device)

    def run(
        self, rows: Callable[[nn.Module, Any, Batch], torch.Tensor], kind: StepKind, runs: Sequence[Run]
    ) -> torch.Tensor:
        with torch.no_grad():
            batch = pack(kind, runs, self.token_table, self._module.device)
            return rows(self._module, self._body.plan(batch), batch)


class _Part(NamedTuple):
    """New tokens [first, last) of one sequence, as a run of some step."""

    sequence: int
    first: int
    last: int


def check_packing(
    module: Any,
    body: AttentionBody,
    calls: Sequence[LayerCall],
    shapes: Sequence[LayerShape],
    architecture: str,
    *,
    max_model_len: int,
    seed: int = 0,
) -> float:
    """Compares two sequences that share a prefix, packed, chunked and decoded over scattered slots of a pool full of
    NaN, with the library's own attention over each alone. Returns the largest difference as a part of the largest
    |logit|; raises Refused if it is too large.
    """
    rng = np.random.default_rng(seed)
    longest, shortest, shared = _check_lengths(calls, max_model_len, module.device.type)
    vocab = module.config.get_text_config(decoder=True).vocab_size
    ids = [rng.integers(0, vocab, size).astype(np.int32) for size in (longest, shortest)]
    ids[1][:shared] = ids[0][:shared]
    slots = [one.astype(np.int32) for one in np.split(rng.permutation(np.arange(1, 2 * longest + 3)), [longest])]
    slots[1] = np.concatenate([slots[0][:shared], slots[1]])[:shortest]
    with attention_of(module, REFERENCE):
        alone = [_reference(module, one) for one in ids]
    trial = _Trial(module, body, calls, shapes, slots=2 * longest + 3)
    worst = 0.0
    for kind, parts in _check_steps(longest, shortest, shared):
        runs = [_run(part, kind, slots, ids, trial.token_table) for part in parts]
        rows = trial.run(full_rows, kind, runs).float()
        for part, run in zip(parts, runs, strict=True):
            got, rows = rows[: len(run.rows)], rows[len(run.rows) :]
            worst = max(worst, _difference(got, alone[part.sequence](part.first + run.rows), module.dtype))
    tolerance = EXACT_TOLERANCE if module.dtype == torch.float32 else HALF_TOLERANCE
    if not worst <= tolerance:  # NaN is neither
        raise Refused(
            architecture,
            f"packed steps change its logits by {worst:.2g} of the largest one (allowed: {tolerance:g}): requests "
            "would see each other, or its attention has a rule that this engine does not know",
        )
    return worst


def _check_lengths(calls: Sequence[LayerCall], max_model_len: int, device: str) -> tuple[int, int, int]:
    """(longer sequence, shorter one, their common prefix): beyond the largest window where memory allows."""
    window = max(call.window for call in calls)
    longest = max(3, min(max(41, window + 2 * ROWS_OF_A_RUN), max_model_len, LONGEST_CHECK.get(device, 1024)))
    shortest = max(3, longest * 3 // 4)
    return longest, shortest, shortest // 3


def _check_steps(longest: int, shortest: int, shared: int) -> list[tuple[StepKind, list[_Part]]]:
    """A prefix and what shares it in one step; a later chunk beside a sequence over the same prefix; a decode step."""
    middle = max(shared, longest // 2)
    chunks = [_Part(0, 0, shared), _Part(0, shared, middle)]
    later = [_Part(0, middle, longest - 1), _Part(1, shared, shortest - 1)]
    last = [_Part(0, longest - 1, longest), _Part(1, shortest - 1, shortest)]
    steps = [(StepKind.PREFILL, chunks), (StepKind.SCORE, later), (StepKind.DECODE, last)]
    return [(kind, [part for part in parts if part.first < part.last]) for kind, parts in steps]


def _run(part: _Part, kind: StepKind, slots: Sequence[Int32s], ids: Sequence[Int32s], token_table: torch.Tensor) -> Run:
    index, first, last = part
    rows = np.arange(max(0, last - first - ROWS_OF_A_RUN), last - first, dtype=np.int32)
    new: Int32s | None = ids[index][first:last]
    if kind is StepKind.DECODE:
        token_table[index, first] = int(ids[index][first])
        new = None
    return Run(index, slots[index][:first], slots[index][first:last], new, rows)


def _reference(module: Any, ids: Int32s) -> Callable[[Int32s], torch.Tensor]:
    """The model alone over `ids`; the result looks rows up by position. Only the last hidden rows are kept."""
    at = torch.arange(len(ids), device=module.device)
    with torch.no_grad():
        out = module(
            input_ids=torch.from_numpy(ids).long().to(module.device)[None], position_ids=at[None], use_cache=False
        )
    logits: torch.Tensor = out.logits[0]
    return lambda rows: logits[torch.from_numpy(np.asarray(rows)).long().to(logits.device)].float()


def _difference(got: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype) -> float:
    """max |difference| of a row over its largest |logit|: the worst row's in float32, else a quantile of the rows'."""
    rows = (got - wanted).abs().amax(1) / wanted.abs().amax()
    return float(rows.max() if dtype == torch.float32 or rows.isnan().any() else rows.quantile(HALF_QUANTILE))
