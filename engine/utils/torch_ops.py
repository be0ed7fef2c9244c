"""Registers the engine's own operations with torch by name, so that compiled layers call them as they are.

`torch.library.custom_op` does that too, and wraps each in code for gradients, which costs the host tens of microseconds
a call. Nothing here is differentiated, and attention is called in every layer of every step.
"""

from collections.abc import Callable
from typing import Any, Final, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., Any])

NAMESPACE: Final = "assay"
DEVICES: Final = ("CPU", "CUDA")
_library: Any = torch.library.Library(NAMESPACE, "FRAGMENT")  # type: ignore[no-untyped-call]  # ops live as long


def operation(schema: str, shape: Callable[..., torch.Tensor]) -> Callable[[F], F]:
    """Registers a function as `torch.ops.assay.<name>`. A result must be new memory.

    Args:
        schema: in torch's language of schemas; `Tensor(a!)` is one that the function writes to.
        shape: makes an empty result from the same arguments, for the compiler.

    Returns:
        A decorator that returns the function unchanged.
    """

    def register(run: F) -> F:
        name = schema.partition("(")[0]
        _library.define(schema)
        for device in DEVICES:
            _library.impl(name, run, device)
        torch.library.register_fake(f"{NAMESPACE}::{name}", shape, lib=_library)
        return run

    return register
