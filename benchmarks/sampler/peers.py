"""Implements the sampler's cases with FlashInfer and torch, each in the fastest known way.

They get the same bf16 logits and a temperature for each row. For a sampling case they return tokens only; the case
`logprobs20` measures their log-probabilities. Shape legend: R rows, V vocabulary.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import numpy as np
import torch

from benchmarks.sampler.sampler_cases import N_TOP, TEMPERATURE, TOP_K, TOP_P, ids

Peer = Callable[[torch.Tensor], Any]
FLASHINFER, FLASHINFER_K, TORCH = "flashinfer", "flashinfer, k a number", "torch"


def peers(name: str, rows: int, vocab_size: int, device: torch.device, wanted: frozenset[str]) -> dict[str, Peer]:
    """Returns the requested implementations of a case that are installed, by name."""
    found: dict[str, Peer] = {}
    if "torch" in wanted and name in _TORCH:
        found[TORCH] = _TORCH[name](rows, vocab_size, device)
    if "flashinfer" in wanted and name in _FLASHINFER and device.type == "cuda" and (library := _flashinfer()):
        found[FLASHINFER] = _FLASHINFER[name](library, rows, device)
    if "flashinfer-k" in wanted and name == "topk_topp" and device.type == "cuda" and (library := _flashinfer()):
        found[FLASHINFER_K] = _flashinfer_scalar(library, rows, device)
    return found


def _flashinfer() -> Any:
    try:
        return import_module("flashinfer.sampling")
    except ImportError:
        return None


def _numbers(rows: int, device: torch.device, value: float) -> torch.Tensor:
    return torch.full((rows,), value, device=device)


def _flashinfer_noise(device: torch.device) -> dict[str, torch.Tensor]:
    return {name: torch.ones(1, dtype=torch.int64, device=device) for name in ("seed", "offset")}


def _flashinfer_temp(library: Any, rows: int, device: torch.device) -> Peer:
    temperature_R1, noise = _numbers(rows, device, TEMPERATURE)[:, None], _flashinfer_noise(device)
    return lambda logits_RV: library.sampling_from_logits(logits_RV / temperature_R1, **noise)


def _flashinfer_topk_topp(library: Any, rows: int, device: torch.device) -> Peer:
    temperature_R1, noise = _numbers(rows, device, TEMPERATURE)[:, None], _flashinfer_noise(device)
    top_k_R, top_p_R = _numbers(rows, device, TOP_K).to(torch.int32), _numbers(rows, device, TOP_P)
    return lambda logits_RV: library.top_k_top_p_sampling_from_logits(
        logits_RV / temperature_R1, top_k_R, top_p_R, **noise
    )


def _flashinfer_scalar(library: Any, rows: int, device: torch.device) -> Peer:
    temperature_R1, noise = _numbers(rows, device, TEMPERATURE)[:, None], _flashinfer_noise(device)
    top_p_R = _numbers(rows, device, TOP_P)
    return lambda logits_RV: library.top_k_top_p_sampling_from_logits(
        logits_RV / temperature_R1, TOP_K, top_p_R, **noise
    )


def _flashinfer_topp(library: Any, rows: int, device: torch.device) -> Peer:
    temperature_R, noise = _numbers(rows, device, TEMPERATURE), _flashinfer_noise(device)
    top_p_R = _numbers(rows, device, TOP_P)

    def draw(logits_RV: torch.Tensor) -> Any:
        probs_RV = library.softmax(logits_RV.float(), temperature=temperature_R)
        return library.top_p_sampling_from_probs(probs_RV, top_p_R, **noise)

    return draw


def _race(probs_RN: torch.Tensor) -> torch.Tensor:
    """Draws tokens i64 [R] as torch.multinomial does, without its check of the input, which waits for the device."""
    return (probs_RN / torch.empty_like(probs_RN).exponential_()).argmax(1)


def _torch_greedy(rows: int, vocab_size: int, device: torch.device) -> Peer:
    return lambda logits_RV: logits_RV.argmax(1)


def _torch_temp(rows: int, vocab_size: int, device: torch.device) -> Peer:
    temperature_R1 = _numbers(rows, device, TEMPERATURE)[:, None]
    return lambda logits_RV: _race(torch.softmax(logits_RV / temperature_R1, 1))


def _torch_topk_topp(rows: int, vocab_size: int, device: torch.device) -> Peer:
    """Filters the whole batch with one top-k."""
    temperature_R1 = _numbers(rows, device, TEMPERATURE)[:, None]

    def draw(logits_RV: torch.Tensor) -> Any:
        values_RK, ids_RK = logits_RV.topk(min(TOP_K, vocab_size), dim=1)
        probs_RK = torch.softmax(values_RK / temperature_R1, 1)
        probs_RK = probs_RK.masked_fill(probs_RK.cumsum(1) - probs_RK >= TOP_P, 0)
        return ids_RK.gather(1, _race(probs_RK)[:, None])

    return draw


def _torch_topp(rows: int, vocab_size: int, device: torch.device) -> Peer:
    temperature_R1 = _numbers(rows, device, TEMPERATURE)[:, None]

    def draw(logits_RV: torch.Tensor) -> Any:
        z_RV, ids_RV = (logits_RV / temperature_R1).sort(1, descending=True)
        probs_RV = torch.softmax(z_RV, 1)
        probs_RV = probs_RV.masked_fill(probs_RV.cumsum(1) - probs_RV >= TOP_P, 0)
        return ids_RV.gather(1, _race(probs_RV)[:, None])

    return draw


def _torch_logprobs(rows: int, vocab_size: int, device: torch.device) -> Peer:
    """Returns the 20 best, and the log-probability and rank (among distinct values) of one token a row."""
    tokens_R1 = torch.from_numpy(ids(0, 1, vocab_size, 5)).to(device, torch.int64).expand(rows, 1).contiguous()

    def report(logits_RV: torch.Tensor) -> Any:
        logprobs_RV = torch.log_softmax(logits_RV, 1, dtype=torch.float32)
        own_R1 = logprobs_RV.gather(1, tokens_R1)
        return logprobs_RV.topk(min(N_TOP, vocab_size), dim=1), own_R1, (logprobs_RV > own_R1).sum(1)

    return report


def _torch_token_ids(rows: int, vocab_size: int, device: torch.device) -> Peer:
    """Returns the log-probabilities of eight ids a row, and a token as in the case `temp`."""
    chosen = np.stack([ids(row, 8, vocab_size, 3) for row in range(rows)]).astype(np.int64)
    chosen_R8 = torch.from_numpy(chosen).to(device)
    draw = _torch_temp(rows, vocab_size, device)

    def report(logits_RV: torch.Tensor) -> Any:
        return torch.log_softmax(logits_RV, 1, dtype=torch.float32).gather(1, chosen_R8), draw(logits_RV)

    return report


_TORCH: dict[str, Callable[[int, int, torch.device], Peer]] = {
    "greedy": _torch_greedy,
    "temp": _torch_temp,
    "topk_topp": _torch_topk_topp,
    "topp": _torch_topp,
    "logprobs": _torch_logprobs,
    "token_ids": _torch_token_ids,
}
_FLASHINFER: dict[str, Callable[[Any, int, torch.device], Peer]] = {
    "temp": _flashinfer_temp,
    "topk_topp": _flashinfer_topk_topp,
    "topp": _flashinfer_topp,
}
