"""A start-up compiles what is launched later: no request waits for the compiler. By dry runs, without a GPU."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from gpu_sampler.sampler import Sampler
from gpu_sampler.sampling_params import SamplingParams
from gpu_sampler.spec_decode import PROPOSAL_IDS, Proposal, Rule, VerifyRules
from tests.gpu_sampler.compiler import CAPABILITY, needs_compiler, warns_of_fusion

pytestmark = [needs_compiler, warns_of_fusion]
SIZE = 2048
SLOTS = 18
DRAFTS = 4
ROWS = (1, 3, 4, 17)
REQUESTS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {},
    {"logprobs": 2},
    {"top_p": 0.9},
    {"top_k": 700, "logprobs": 0},
    {"min_p": 0.1, "logprobs": 3, "logprob_token_ids": (5, 6, 7)},
    {"top_p": 0.9, "logprobs": 1},
    {"presence_penalty": 1.0},
    {"logit_bias": ((1, 2.0),), "top_p": 0.9, "logprobs": 2},
    {"allowed_token_ids": (1, 2, 3)},
    {"allowed_token_ids": (1, 2, 3), "frequency_penalty": 0.5, "logprobs": 0},
    {"bad_words_ids": ((3, 4),), "min_tokens": 3, "stop_token_ids": (9,)},
)


def on_kernels(processed: bool) -> Sampler:
    """Its rows are the kernels', over tensors on the CPU: for dry runs."""
    from gpu_sampler.triton_sampler import TritonSampler

    sampler = Sampler(num_slots=SLOTS, vocab_size=SIZE)
    sampler._triton = TritonSampler(sampler.state, torch.device("cpu"), processed=processed)
    return sampler


def rows_of_one_kind(sampler: Sampler) -> Iterator[list[int]]:
    """Slots of batches of all sizes, whose rows are alike."""
    for request in REQUESTS:
        for rows in ROWS:
            slots = list(range(1, rows + 1))
            for slot in slots:
                sampler.admit(slot, SamplingParams(max_tokens=20, **request), [1, 2, 3], seed=slot)
            yield slots
            for slot in slots:
                sampler.release(slot)


def proposal(requests: int, drafts: int) -> Proposal:
    shape = (requests, drafts, PROPOSAL_IDS)
    ids = torch.zeros((requests, drafts), dtype=torch.int32)
    q_ids = torch.zeros(shape, dtype=torch.int32)
    return Proposal(ids, torch.zeros(requests, dtype=torch.uint8), q_ids, torch.zeros(shape), None)


def serve(dtype: torch.dtype, drafts: int, rules: VerifyRules, processed: bool) -> None:
    """Steps, and with `drafts` runs of every length up to so many, as an engine asks for them."""
    sampler = on_kernels(processed)
    for slots in rows_of_one_kind(sampler):
        sampler.sample(torch.zeros((len(slots), SIZE), dtype=dtype), slots)
        for length in range(1, drafts + 1):
            run = torch.zeros((len(slots) * (length + 1), SIZE), dtype=dtype)
            sampler.verify(run, slots, proposal(len(slots), length), rules)
            rows, last = torch.zeros((len(slots), SIZE), dtype=dtype), length - 1
            sampler.draft(rows, slots, last, "probabilistic", rules)
            if sampler.prepare_drafts(slots):
                sampler.launch_draft(rows, torch.tensor(slots, dtype=torch.int32), last, "greedy", rules)


def left_out(
    dtype: torch.dtype = torch.bfloat16, drafts: int = DRAFTS, rule: Rule = "standard", processed: bool = False
) -> list[str]:
    """Kernels with a variant that serving launches and the start-up does not."""
    from gpu_sampler.kernel_cache import dry_run
    from gpu_sampler.precompile import Served, variants_of

    rules = VerifyRules(rule=rule, seeded="strict", synthetic=(0.5,) * DRAFTS if rule == "synthetic" else ())
    served = Served(vocab_size=SIZE, dtype=dtype, num_slots=SLOTS, drafts=drafts, rules=rules, processed=processed)
    known = set(variants_of(served, CAPABILITY))
    with dry_run(CAPABILITY) as found:
        serve(dtype, drafts, rules, processed)
    assert len(found) > 15
    return sorted({one.kernel for one in found if one not in known})


@pytest.mark.full(keep=1)
@pytest.mark.parametrize(
    ("dtype", "drafts", "rule", "processed"),
    [
        (torch.bfloat16, 0, "standard", False),
        (torch.float16, 0, "standard", False),
        (torch.bfloat16, DRAFTS, "standard", False),
        (torch.bfloat16, DRAFTS, "block", True),
        (torch.float32, DRAFTS, "synthetic", False),
    ],
    ids=["plain", "plain, halves", "standard", "block, processed", "synthetic, singles"],
)
def test_start_up_compiles_all_that_serving_launches(
    dtype: torch.dtype, drafts: int, rule: Rule, processed: bool
) -> None:
    assert left_out(dtype, drafts, rule, processed) == []


@pytest.mark.full
def test_start_up_without_lists_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """An earlier fault: rows with top-p and nothing else waited for the compiler as they were verified."""
    from gpu_sampler import triton_sampler

    monkeypatch.setattr(triton_sampler, "LISTED", triton_sampler.WITH_MASK)
    assert left_out() == ["_nucleus_fallback_kernel", "_nucleus_rejection_kernel", "_sample_kernel"]


@pytest.mark.full
def test_code_of_one_number_of_drafts_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """An earlier fault: Triton specializes on the number 1 unless it is declared otherwise."""
    from gpu_sampler.kernels import rejection_sample

    (drafts,) = (one for one in rejection_sample._rejection_sample_kernel.params if one.name == "K")
    monkeypatch.setattr(drafts, "do_not_specialize", False)
    rejection_sample._rejection_sample_kernel.device_caches.clear()
    try:
        assert left_out() == ["_rejection_sample_kernel"]
    finally:
        rejection_sample._rejection_sample_kernel.device_caches.clear()


@pytest.mark.parametrize("size", [SIZE, 151_936])
def test_start_up_with_speculation_compiles_what_one_without_does_and_more(size: int) -> None:
    from gpu_sampler.precompile import Served, variants_of

    plain, spec = (variants_of(Served(vocab_size=size, drafts=drafts), CAPABILITY) for drafts in (0, DRAFTS))
    assert len(set(plain)) == len(plain) and set(plain) < set(spec)
    assert {one.kernel for one in spec} - {one.kernel for one in plain} >= {
        "_rejection_sample_kernel",
        "_expand_kernel",
    }


def test_head_of_any_number_of_rows_is_compiled_once() -> None:
    from gpu_sampler.kernel_cache import dry_run
    from gpu_sampler.kernels.lm_head_logprob import head_logprob
    from gpu_sampler.precompile import Served, variants_of

    known = set(variants_of(Served(vocab_size=SIZE), CAPABILITY))
    with dry_run(CAPABILITY) as found:
        for rows in (*ROWS, 129, 1000):
            hidden, head = (torch.zeros((n, 896), dtype=torch.bfloat16) for n in (rows, SIZE))
            head_logprob(hidden, head, torch.zeros(rows, dtype=torch.int64), round_logits="bf16", workspace=1)
    assert len(found) == 3 and set(found) <= known


@pytest.mark.parametrize("normed", [False, True])
def test_rotation_of_any_number_of_tokens_is_compiled_once(normed: bool) -> None:
    """Compiles like a model's first captured step: the start-up knows no heads. Code of its own would also be other
    bits."""
    from engine.kernels.qk_norm_rope import Rotation, qk_norm_rope
    from gpu_sampler.kernel_cache import dry_run

    half = torch.bfloat16
    norm = torch.ones(128, dtype=half) if normed else None
    keys, values = (torch.zeros((SLOTS, 1, 8, 128), dtype=half) for _ in range(2))
    with dry_run(CAPABILITY) as found:
        for tokens in (*ROWS, 2, 5, 16):
            q, k, v = torch.split(torch.zeros((tokens, 32, 128), dtype=half), [16, 8, 8], dim=1)
            cos, sin = torch.zeros((2, tokens, 128), dtype=half)
            rotation = Rotation(cos, sin, norm, norm, 1e-6)
            qk_norm_rope(q, k, v, rotation, keys, values, torch.zeros(tokens, dtype=torch.int32))
    assert [one.kernel for one in found] == ["_qk_norm_rope_kernel"]


SHAPES = ((4096, 1024), (1024, 2048), (1024, 3072), (6144, 4096), (4096, 4096), (4096, 12_288), (32_800, 1024))


def skinny_step(dtype: torch.dtype) -> list[str]:
    """Kernels with a variant that products of few rows launch and the start-up does not."""
    from engine.kernels.skinny_gemm import skinny_gemm
    from engine.warmup.precompile_kernels import skinny_gemm_variants
    from gpu_sampler.kernel_cache import dry_run

    known = set(skinny_gemm_variants(dtype, CAPABILITY))
    with dry_run(CAPABILITY) as found:
        for columns, width in SHAPES:
            weight, bias = torch.empty((columns, width), dtype=dtype), torch.empty(columns, dtype=dtype)
            for rows in ROWS:
                x, residual = torch.empty((rows, width), dtype=dtype), torch.empty((rows, columns), dtype=dtype)
                for added in (None, residual):
                    skinny_gemm(x, weight, residual=added)
                    skinny_gemm(x, weight, bias, residual=added)
                skinny_gemm(x, weight, gated=True)
    assert len(found) >= 3
    return sorted({one.kernel for one in found if one not in known})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_start_up_compiles_the_products_of_few_rows(dtype: torch.dtype) -> None:
    assert skinny_step(dtype) == []


def test_products_of_a_cut_that_start_up_does_not_know_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    from engine.kernels import skinny_gemm
    from engine.kernels.skinny_gemm import GemmTile

    monkeypatch.setattr(skinny_gemm, "tiles", lambda: [GemmTile(64, 32, 8, 2)])
    assert skinny_step(torch.bfloat16) == ["_skinny_gemm_kernel"]
