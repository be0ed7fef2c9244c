"""Plants faults inside of `rejection_sample`: each replaces one of the small functions that its kernel calls."""

from typing import Any

import triton

from gpu_sampler.kernels import rejection_sample, residual_sample


@triton.jit
def nothing_of_q(attempt):  # type: ignore[no-untyped-def]
    """For `share_of`: the token behind a rejected draft comes from p."""
    return attempt * 0.0


@triton.jit
def always_one(weight_D, accepted):  # type: ignore[no-untyped-def]
    """For `weight_behind`: the residual of `block` forgets the weight of the run so far."""
    return 1.0


@triton.jit
def only_p(p, q):  # type: ignore[no-untyped-def]
    """For `ratio_of`: drafts are accepted with probability p in place of p / q."""
    return p


def plant(monkeypatch: Any, name: str, fault: Any) -> None:
    """Puts `fault` in the place of a function of the rejection sampler, until `monkeypatch` undoes it.

    The kernel and `residual_sample` are compiled again: code compiled before would be found in the cache.
    """
    for module in (rejection_sample, residual_sample):
        if hasattr(module, name):
            monkeypatch.setattr(module, name, fault)
    monkeypatch.setattr(rejection_sample, "residual_sample", triton.jit(residual_sample.residual_sample.fn))
    monkeypatch.setattr(
        rejection_sample,
        "_rejection_sample_kernel",
        triton.jit(rejection_sample._rejection_sample_kernel.fn, do_not_specialize=["K"]),
    )
