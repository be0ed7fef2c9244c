"""The FlashInfer backend: its gate, its start-up checks, the calls it makes, and (on a GPU) the distribution of what it
draws.

On a CPU a recorder stands for the library, so that seeds, offsets and routes are tested everywhere.
"""

import sys
from collections.abc import Callable
from importlib import metadata
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from gpu_sampler import flashinfer_sampler
from gpu_sampler.backend import check_installed
from gpu_sampler.flashinfer_sampler import FlashInferRows, FlashInferSampler, eligible
from gpu_sampler.sampling_params import SamplingParams
from gpu_sampler.state.host_state import SamplingState, SlotFlag
from tests.support.distribution import enumerate_distribution
from tests.support.statistics import chi_square

ALPHA = 1e-4 / 512
VOCABULARY = 65_536
CUDA = torch.device("cuda")
PLAIN: dict[str, Any] = {"temperature": 0.8, "top_k": 50, "top_p": 0.9}


def passes(*, processed: bool = False, **params: Any) -> bool:
    """The gate, on the flags that admission gives the slot."""
    given = SamplingParams(**PLAIN | params)
    state = SamplingState(num_slots=2, vocab_size=111)
    state.admit(1, given, [5, 6], seed=1)
    return eligible(given, SlotFlag(int(state.flags[1])), processed=processed)


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"top_k": 0},
        {"top_p": 1.0},
        {"logprobs": 20, "logprob_token_ids": (3, 4)},
        {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "logit_bias": ((3, 1.0),)},
        {"allowed_token_ids": (1, 2, 3), "bad_words_ids": ((5,), (6, 7)), "min_tokens": 2, "stop_token_ids": (9,)},
        {"temperature": 0.01},
        {"n": 4},
    ],
)
def test_gate_lets_through_what_other_kernels_can_serve_beside_it(params: dict[str, Any]) -> None:
    assert passes(**params)


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.0},
        {"seed": 7},
        {"seed": 0},
        {"top_k": 0, "top_p": 1.0},
        {"top_k": -1, "top_p": 1.0},
        {"min_p": 0.1},
        {"temperature": 0.009},
        {"processed": True, "logprobs": 0},
        {"processed": True, "logprob_token_ids": (3,)},
    ],
)
def test_gate_refuses(params: dict[str, Any]) -> None:
    assert not passes(**params)


def test_gate_takes_a_processed_server_where_the_row_wants_no_logprobs() -> None:
    assert passes(processed=True)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Pretends a version (None: absent) and a compute capability."""

    def pretend(version: str | None = "0.6.14", capability: tuple[int, int] = (9, 0)) -> None:
        def found(name: str) -> str:
            if version is None:
                raise metadata.PackageNotFoundError(name)
            return version

        monkeypatch.setattr(metadata, "version", found)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)

    return pretend


@pytest.mark.parametrize("version", ["0.6.14", "0.6.14.post1", "0.6.15+cu130", "0.6.99"])
def test_versions_in_range_pass(version: str, card: Callable[..., None]) -> None:
    card(version)
    assert check_installed(CUDA) == version


@pytest.mark.parametrize("version", ["0.6.13", "0.7.0", "0.7.2.post1", "1.0.0", "0.6.14rc1", "0.6.15.dev3", "unknown"])
def test_versions_out_of_range_are_refused_by_name_value_and_range(version: str, card: Callable[..., None]) -> None:
    card(version)
    with pytest.raises(ValueError, match=r"flashinfer-python >=0\.6\.14,<0\.7.*Given: " + version.replace(".", r"\.")):
        check_installed(CUDA)


def test_absence_is_refused(card: Callable[..., None]) -> None:
    card(None)
    with pytest.raises(ValueError, match="Given: not installed"):
        check_installed(CUDA)


def test_older_card_is_refused(card: Callable[..., None]) -> None:
    card(capability=(7, 5))
    with pytest.raises(ValueError, match=r"compute capability at least 8\.0\. Given: 7\.5"):
        check_installed(CUDA)
    card(capability=(8, 0))
    check_installed(CUDA)


def test_cpu_is_refused(card: Callable[..., None]) -> None:
    card()
    with pytest.raises(ValueError, match=r"device cuda\. Given: cpu"):
        check_installed(torch.device("cpu"))


class Recorder(ModuleType):
    """`flashinfer.sampling` as far as it is used: keeps what it was given, and the noise as it was at the call."""

    def __init__(self) -> None:
        super().__init__("flashinfer.sampling")
        self.calls: list[dict[str, Any]] = []

    def top_p_sampling_from_probs(self, probs: torch.Tensor, top_p: torch.Tensor, **noise: torch.Tensor) -> Any:
        return self._record("top_p", probs, None, top_p, noise)

    def top_k_top_p_sampling_from_logits(
        self, logits: torch.Tensor, top_k: Any, top_p: torch.Tensor, *, filter_apply_order: str, **noise: torch.Tensor
    ) -> Any:
        assert filter_apply_order == "top_k_first"
        return self._record("top_k_top_p", logits, top_k, top_p, noise)

    def _record(self, name: str, rows: torch.Tensor, top_k: Any, top_p: Any, noise: dict[str, torch.Tensor]) -> Any:
        assert all(x.shape == (1,) and x.dtype == torch.int64 for x in noise.values())
        at = tuple(int(noise[key]) for key in ("seed", "offset"))
        self.calls.append({"name": name, "rows": rows, "top_k": top_k, "top_p": top_p, "noise": at})
        return torch.zeros(len(rows), dtype=torch.int32)


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    library = Recorder()
    monkeypatch.setitem(sys.modules, "flashinfer", ModuleType("flashinfer"))
    monkeypatch.setattr(sys.modules["flashinfer"], "sampling", library, raising=False)
    monkeypatch.setitem(sys.modules, "flashinfer.sampling", library)
    monkeypatch.setattr(flashinfer_sampler, "check_installed", lambda device: "0.6.14")
    return library


def rows_of(count: int, top_k: int = 5, top_p: float = 0.9) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.zeros(count, 17), torch.full((count,), top_k, dtype=torch.int32), torch.full((count,), top_p)


def test_noise_is_two_tensors_whose_offset_moves_with_every_call(recorder: Recorder) -> None:
    sampler = FlashInferSampler(torch.device("cpu"), seed=99)
    z, top_k_R, top_p_R = rows_of(3)
    for top_k in (None, top_k_R, top_k_R):
        sampler.sample(z, top_k, top_p_R)
    seeds, offsets = zip(*(call["noise"] for call in recorder.calls), strict=True)
    assert seeds == (99, 99, 99)
    assert offsets[0] < offsets[1] < offsets[2] and min(np.diff(offsets)) >= 300  # more than a call can take


def test_samplers_without_a_given_seed_differ(recorder: Recorder) -> None:
    for _ in range(2):
        FlashInferSampler(torch.device("cpu")).sample(*rows_of(1))
    assert recorder.calls[0]["noise"] != recorder.calls[1]["noise"]


def test_each_route_goes_to_its_kernel(recorder: Recorder) -> None:
    sampler = FlashInferSampler(torch.device("cpu"), seed=1)
    z, top_k, top_p = rows_of(3)
    sampler.sample(z, top_k, top_p)
    sampler.sample(z, None, top_p)
    with_top_k, no_top_k = recorder.calls
    assert (with_top_k["name"], with_top_k["top_k"].tolist()) == ("top_k_top_p", [5, 5, 5])
    assert no_top_k["name"] == "top_p" and torch.allclose(no_top_k["rows"].sum(1), torch.ones(3))


def test_rows_are_called_by_their_own_top_k_alone(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    state = SamplingState(num_slots=6, vocab_size=111)
    rows = FlashInferRows(state, torch.device("cpu"), processed=False)
    for slot, top_k in enumerate((50, 0, 100, 0, 50), start=1):
        state.admit(slot, SamplingParams(**PLAIN | {"top_k": top_k, "seed": 3 if slot == 5 else None}), [1], seed=slot)
        rows.note(slot)
    slots = np.array([1, 2, 3, 4, 0, 5])
    branches = (("candidates", np.array([0, 2, 5])), ("nucleus", np.array([1, 3])), ("greedy", np.array([4])))
    found = rows.taken(slots, branches)
    assert found is not None
    away, left = found
    assert [(name, members.tolist()) for name, members in left] == [
        ("candidates", [5]),
        ("greedy", [4]),
        ("flashinfer", [0, 1, 2, 3]),
    ]
    prepared = rows.prepare(away, len(slots))
    calls = [(call.rows.tolist(), call.top_k_P.tolist(), call.has_top_k) for call in prepared.calls]
    assert calls == [([1, 3], [0, 0], False), ([0, 2], [50, 100], True)]
    assert (
        prepared.flags_R.tolist() == [1, 1, 1, 1, 0, 0] and rows.taken(slots[4:], (("greedy", np.arange(1)),)) is None
    )


@pytest.mark.parametrize(("temperature", "taken"), [(0.01, True), (0.0099, False)])
def test_rows_of_the_least_temperature_are_taken(recorder: Recorder, temperature: float, taken: bool) -> None:
    """The slot keeps it as float32, which rounds 0.01 downwards."""
    state = SamplingState(num_slots=2, vocab_size=111)
    rows = FlashInferRows(state, torch.device("cpu"), processed=False)
    state.admit(1, SamplingParams(**PLAIN | {"temperature": temperature}), [1], seed=1)
    rows.note(1)
    assert (rows.taken(np.array([1]), (("candidates", np.arange(1)),)) is not None) == taken


def test_arguments_of_another_kind_are_refused(recorder: Recorder) -> None:
    sampler = FlashInferSampler(torch.device("cpu"), seed=1)
    z, top_k, top_p = rows_of(3)
    for wrong in (z.to(torch.bfloat16), z[0], z.T, torch.zeros(3, 34)[:, ::2]):
        with pytest.raises(ValueError, match=r"got (z|top_k)"):
            sampler.sample(wrong, top_k, top_p)
    with pytest.raises(ValueError, match="got top_k"):
        sampler.sample(z, top_k.to(torch.int64), top_p)
    with pytest.raises(ValueError, match="got top_p"):
        sampler.sample(z, top_k, top_p[:2])
    assert not recorder.calls


def test_warm_up_takes_every_route_and_reports_each(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    said: list[tuple[str, int]] = []
    FlashInferSampler(torch.device("cpu"), seed=1).warm_up(
        lambda line, seconds: said.append((line, len(recorder.calls)))
    )
    assert [calls for _, calls in said] == [1, 2]
    assert all("0.6.14" in line for line, _ in said)
    assert [type(call["top_k"]) for call in recorder.calls] == [torch.Tensor, type(None)]


# On a GPU with FlashInfer: what it draws.

DRAWS = 4_000_000
AT_ONCE = 250_000
LOGITS_V = np.sort(np.random.default_rng(11).normal(0, 2, 29).astype(np.float32))[::-1].copy()
FILTERS = [
    {"top_k": 6, "top_p": 1.0},
    {"top_k": 6, "top_p": 0.8},
    {"top_p": 0.8},
    {"top_k": 1},
    {"top_k": 28, "top_p": 0.5},
    {"top_k": 29, "top_p": 0.99},
    {"top_p": 1e-6},
]
RIGHT: dict[str, Any] = {"temperature": 0.7, "top_k": 6, "top_p": 0.95}
WRONG = [{"temperature": 0.71}, {"top_k": 7, "top_p": 1.0}, {"top_k": 5}, {"top_p": 0.9}]


@pytest.mark.parametrize("wrong", WRONG)
def test_planted_distributions_are_other_distributions(wrong: dict[str, Any]) -> None:
    distributions = [enumerate_distribution(LOGITS_V, SamplingParams(**RIGHT | more)) for more in ({}, wrong)]
    assert np.abs(distributions[0] - distributions[1]).sum() > 0.004  # 4 million draws tell a tenth of it


def drawn(sampler: FlashInferSampler, params: SamplingParams) -> np.ndarray[Any, Any]:
    """i64 [29]: how often each token came in DRAWS draws of one distribution."""
    z_V = torch.from_numpy(LOGITS_V).to(CUDA) / params.temperature
    z_RV = z_V.expand(AT_ONCE, -1).contiguous()
    top_k_R = torch.full((AT_ONCE,), params.top_k, dtype=torch.int32, device=CUDA) if params.top_k else None
    top_p_R = torch.full((AT_ONCE,), params.top_p, device=CUDA)
    counts = torch.zeros(len(LOGITS_V), dtype=torch.int64, device=CUDA)
    for _ in range(DRAWS // AT_ONCE):
        counts += torch.bincount(sampler.sample(z_RV, top_k_R, top_p_R), minlength=len(LOGITS_V))
    return counts.cpu().numpy()


@pytest.fixture(scope="module")
def sampler() -> FlashInferSampler:
    pytest.importorskip("flashinfer")
    return FlashInferSampler(CUDA, seed=2026)


@pytest.mark.gpu
@pytest.mark.timeout(900)  # the first use compiles
@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_its_draws_have_our_distribution_where_nothing_ties(
    filters: dict[str, Any], sampler: FlashInferSampler
) -> None:
    params = SamplingParams(temperature=0.7, **filters)
    probs_V = enumerate_distribution(LOGITS_V, params)
    assert chi_square(drawn(sampler, params), probs_V).p_value > ALPHA


@pytest.mark.gpu
@pytest.mark.timeout(900)
@pytest.mark.parametrize("wrong", WRONG)
def test_planted_distribution_is_rejected(wrong: dict[str, Any], sampler: FlashInferSampler) -> None:
    params = SamplingParams(**RIGHT | wrong)
    probs_V = enumerate_distribution(LOGITS_V, SamplingParams(**RIGHT))
    assert chi_square(drawn(sampler, params), probs_V).p_value < ALPHA


@pytest.mark.gpu
@pytest.mark.timeout(900)
@pytest.mark.parametrize("top_k", [None, 6])
def test_replays_of_a_graph_do_not_repeat_their_noise(top_k: int | None, sampler: FlashInferSampler) -> None:
    z_RV = torch.zeros((64, VOCABULARY), device=CUDA)
    top_k_R = None if top_k is None else torch.full((64,), top_k, dtype=torch.int32, device=CUDA)
    top_p_R = torch.full((64,), 0.9, device=CUDA)
    sampler.sample(z_RV, top_k_R, top_p_R)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens_R = sampler.sample(z_RV, top_k_R, top_p_R)
    found = []
    for _ in range(3):
        graph.replay()
        found.append(tokens_R.tolist())
    assert found[0] != found[1] != found[2] != found[0]


@pytest.mark.gpu
@pytest.mark.timeout(900)
@pytest.mark.parametrize("top_k", [None, 6])
def test_a_row_without_a_finite_value_stays_in_its_row(top_k: int | None, sampler: FlashInferSampler) -> None:
    """It gets some token, does not hang, and its neighbours draw their only token."""
    z_RV = torch.full((3, VOCABULARY), -torch.inf, device=CUDA)
    z_RV[0, 5], z_RV[2, 7] = 1.0, -3e38
    top_k_R = None if top_k is None else torch.full((3,), top_k, dtype=torch.int32, device=CUDA)
    tokens = sampler.sample(z_RV, top_k_R, torch.full((3,), 0.9, device=CUDA)).tolist()
    assert (tokens[0], tokens[2]) == (5, 7) and 0 <= tokens[1] < VOCABULARY
