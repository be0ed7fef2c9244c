"""Processes that wait on a machine with GPUs: Ray still chooses the GPU of those that become workers."""

import pytest

from tests.support.standby_fitness import fit_after

pytestmark = pytest.mark.gpu
UNCOUNTED = "import os; del os.environ['PYTORCH_NVML_BASED_CUDA_CHECK']\n"


def test_what_a_replica_imports_leaves_the_driver_alone() -> None:
    assert fit_after("")


def test_a_process_is_unfit_once_torch_has_asked_the_driver_for_its_gpus() -> None:
    """Planted: replicas of several GPUs would all be on the first one, and torch does not call itself initialised."""
    assert not fit_after(f"{UNCOUNTED}assert torch.cuda.is_available() and not torch.cuda.is_initialized()")
