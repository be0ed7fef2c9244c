"""Kernels are compiled without a GPU, and found again by the launches that they were compiled for."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu_sampler.compiler import CAPABILITY, needs_compiler, warns_of_fusion

pytestmark = [needs_compiler, warns_of_fusion]
SMALL = "_token_counts_kernel"


class NotLaunched(Exception):
    """The JIT got as far as the launch of a compiled kernel."""


@pytest.fixture
def looked_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """Says, for each kernel that the JIT wanted compiled, whether an empty cache of its own had it."""
    import triton

    found: list[bool] = []
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(
        triton.knobs.compilation, "listener", lambda *, cache_hit, **_: found.append(cache_hit), raising=False
    )
    yield found


def count(slots: int = 17) -> None:
    """One launch, by its launcher: 16 divides the number of slots or not, which Triton compiles apart."""
    from gpu_sampler.kernels.token_counts import update_token_counts
    from gpu_sampler.state.device_state import DeviceState
    from gpu_sampler.state.host_state import SamplingState

    device_state = DeviceState(SamplingState(num_slots=slots, vocab_size=2048, overlay_entries=64), "cpu")
    rows = torch.zeros(3, dtype=torch.int32)
    update_token_counts(device_state, rows, rows)


def launch_on_a_gpu(slots: int = 17) -> None:
    """Follows the JIT on a GPU of `CAPABILITY`, up to the launch."""
    from gpu_sampler import kernel_cache

    class Driver(kernel_cache._NoDevice):
        @property
        def launcher_cls(self) -> Any:
            raise NotLaunched

    with kernel_cache._driver(Driver(CAPABILITY)), pytest.raises(NotLaunched):
        count(slots)


def test_torchs_compiler_does_not_move_the_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    import triton
    from torch._inductor.runtime.cache_dir_utils import triton_cache_dir

    from gpu_sampler.kernel_cache import fix_keys

    monkeypatch.setenv("TRITON_CACHE_DIR", "")
    monkeypatch.delenv("TRITON_CACHE_DIR")
    folder = triton.knobs.cache.dir
    assert triton_cache_dir(0) != folder, "torch's compiler would set another one"
    fix_keys()
    assert triton_cache_dir(0) == triton.knobs.cache.dir == folder
    monkeypatch.setenv("TRITON_CACHE_DIR", "/srv/kernels")  # an image's own stays
    fix_keys()
    assert triton.knobs.cache.dir == "/srv/kernels"


def test_torchs_compiler_does_not_change_the_assembler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A process that is started later has the variable from its start, and would give kernels other keys."""
    import triton
    from torch._inductor.runtime import compile_tasks

    from gpu_sampler.kernel_cache import fix_keys

    torchs = tmp_path / "bin" / "ptxas"
    torchs.parent.mkdir()
    torchs.touch(0o755)
    monkeypatch.setattr(compile_tasks, "__file__", str(tmp_path / "runtime" / "compile_tasks.py"))
    monkeypatch.setenv("TRITON_PTXAS_PATH", "")
    monkeypatch.delenv("TRITON_PTXAS_PATH")
    own = triton.knobs.nvidia.ptxas.path
    compile_tasks._set_triton_ptxas_path.__wrapped__()
    assert os.environ.pop("TRITON_PTXAS_PATH") == str(torchs), "torch's compiler would set its own"
    fix_keys()
    compile_tasks._set_triton_ptxas_path.__wrapped__()
    assert os.environ["TRITON_PTXAS_PATH"] == triton.knobs.nvidia.ptxas.path == own


def test_what_a_launch_had_to_compile_is_named(looked_up: list[bool]) -> None:
    from gpu_sampler.kernel_cache import compiled_inside

    with compiled_inside() as late:
        launch_on_a_gpu()
    assert late == [SMALL]
    with compiled_inside() as late:
        launch_on_a_gpu()
    assert not late


def test_kernel_compiled_ahead_is_found_by_its_launch(looked_up: list[bool]) -> None:
    from gpu_sampler.kernel_cache import compile_variant, dry_run

    with dry_run(CAPABILITY) as found:
        count()
        count()
    (variant,) = found
    assert variant.kernel == SMALL
    assert compile_variant(variant, CAPABILITY) and not compile_variant(variant, CAPABILITY)
    looked_up.clear()
    launch_on_a_gpu()
    assert looked_up == [True]


@pytest.mark.parametrize("linked", [True, False])
def test_launcher_is_compiled_with_its_kernel_where_it_can_be(
    looked_up: list[bool], monkeypatch: pytest.MonkeyPatch, linked: bool
) -> None:
    from triton.backends.nvidia import driver

    from gpu_sampler.kernel_cache import compile_variant, dry_run

    launchers: list[str] = []

    def launcher(src: Any, metadata: Any) -> None:
        launchers.append(metadata.name)
        assert linked, "no library of CUDA"

    monkeypatch.setattr(driver, "CudaLauncher", launcher)
    with dry_run(CAPABILITY) as found:
        count()
    assert compile_variant(found[0], CAPABILITY)
    assert launchers == [SMALL]


@pytest.mark.full(keep=1)
@pytest.mark.parametrize("fault", ["other arguments", "other options", "other capability"])
def test_kernel_compiled_for_something_else_is_not(looked_up: list[bool], fault: str) -> None:
    from gpu_sampler.kernel_cache import compile_variant, dry_run

    with dry_run(CAPABILITY) as found:
        count(slots=16 if fault == "other arguments" else 17)
    (variant,) = found
    if fault == "other options":
        specialization = json.loads(variant.specialization)
        specialization["options"]["num_warps"] *= 2
        variant = variant._replace(specialization=json.dumps(specialization))
    capability = 80 if fault == "other capability" else CAPABILITY
    if fault == "other capability":
        with dry_run(capability) as found:
            count()
        (variant,) = found
    assert compile_variant(variant, capability)
    looked_up.clear()
    launch_on_a_gpu()
    assert looked_up == [False]


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")  # the test's process is
def test_several_processes_compile_what_is_not_there(looked_up: list[bool]) -> None:
    from gpu_sampler.kernel_cache import Compiled, compile_variants, dry_run

    with dry_run(CAPABILITY) as found:
        for slots in (16, 17):
            count(slots)
    torch.set_num_threads(1)
    assert compile_variants(found[:1], CAPABILITY, 1) == Compiled(1, 0, ())
    assert compile_variants(found, CAPABILITY, 2) == Compiled(1, 1, ())


def test_kernel_that_the_compiler_refuses_is_reported_and_costs_the_others_nothing(looked_up: list[bool]) -> None:
    from gpu_sampler.kernel_cache import Compiled, compile_variants, dry_run

    with dry_run(CAPABILITY) as found:
        count()
    specialization = json.loads(found[0].specialization)
    specialization["signature"]["slots"] = "*fp32"  # an index that is no integer
    wrong = found[0]._replace(specialization=json.dumps(specialization))
    assert compile_variants([wrong, *found], CAPABILITY, 1) == Compiled(1, 0, (SMALL,))


def test_a_sampler_has_every_kernel_tell_its_key_before_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """With Triton 3.6 it would depend on what was launched before."""
    from triton.runtime.jit import JITFunction

    from gpu_sampler.kernels import common as row
    from gpu_sampler.kernels import lm_head_logprob, philox, rejection_sample
    from gpu_sampler.state.host_state import SamplingState
    from gpu_sampler.triton_sampler import TritonSampler

    parts = (rejection_sample, lm_head_logprob, philox, row)
    ours = [one for part in parts for one in vars(part).values() if isinstance(one, JITFunction)]
    assert len(ours) > 20
    for one in ours:
        monkeypatch.setattr(one, "hash", None)
    state = SamplingState(num_slots=3, vocab_size=111, overlay_entries=8)
    TritonSampler(state, torch.device("cpu"), processed=False)
    assert all(one.hash for one in ours)


def test_dry_run_leaves_triton_as_it_was(looked_up: list[bool]) -> None:
    import triton
    from triton.runtime import driver

    from gpu_sampler.kernel_cache import dry_run

    before = driver._active, triton.knobs.runtime.jit_cache_hook
    with pytest.raises(ZeroDivisionError), dry_run(CAPABILITY):
        count()
        raise ZeroDivisionError
    assert (driver._active, triton.knobs.runtime.jit_cache_hook) == before
    assert not looked_up, "something was compiled"
