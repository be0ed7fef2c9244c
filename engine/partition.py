"""Partition: of FlashInfer's plan of a decode step the part that depends on lengths."""

from collections.abc import Callable, Iterable
from typing import Any

import torch


class Partition:
    """How the device's blocks share the work of a decode step: of FlashInfer's plan the part that depends on lengths,
    and one copy. All else of it, three copies and some thirty operations on small tensors, is as in the plan that it
    was taken from."""

    def __init__(
        self, call: Callable[..., object], given: Iterable[Any], kv_indptr: torch.Tensor, lengths: torch.Tensor
    ) -> None:
        """`given` are the arguments of such a `call`, both tensors among them, `lengths` only on tensor cores.
        ValueError where they say how long sequences are in another way."""
        self._call, self._given = call, [*given]
        self._indptrs = [at for at, one in enumerate(self._given) if one is kv_indptr]
        self._lengths = [at for at, one in enumerate(self._given) if one is lengths]
        known = {*self._indptrs, *self._lengths}
        others = (one for at, one in enumerate(self._given) if at not in known and isinstance(one, torch.Tensor))
        copied = any(one.device.type == "cpu" and one.shape == lengths.shape for one in others)
        if copied or not self._indptrs:
            raise ValueError("this FlashInfer shares the work of a decode step between blocks in another way")

    @classmethod
    def of(
        cls, module: Any, plan: Callable[[], None], kv_indptr: torch.Tensor, lengths: torch.Tensor
    ) -> "Partition | None":
        """From a plan that ends in `module.plan`; None where that is not as it is known here."""
        call, calls = getattr(module, "plan", None), list[tuple[Any, ...]]()
        if call is None:
            return None

        def noted(*given: Any) -> Any:
            calls.append(given)
            return call(*given)

        module.plan = noted
        try:
            plan()
        finally:
            module.plan = call
        try:
            return cls(call, calls[-1], kv_indptr, lengths)
        except (IndexError, ValueError):
            return None

    def __call__(self, kv_indptr: torch.Tensor) -> None:
        for at in self._indptrs:
            self._given[at] = kv_indptr
        if self._lengths:
            lengths = kv_indptr.diff()
            for at in self._lengths:
                self._given[at] = lengths
        self._call(*self._given)
