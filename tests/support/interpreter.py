"""Makes Triton's interpreter fast enough for tests of whole steps, without a change of the values it computes.

Three costs go: it sorts by compare-and-swap in Python, it patches the language anew whenever one kernel function calls
another, and it computes each integer twice to look for overflows that it then does not report.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np


def hasten() -> Any:
    """Patches the interpreter of this process; its own `tl.sort`, for the test that holds ours against it.

    Call it once, with TRITON_INTERPRET=1 set before Triton is imported.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    theirs = tl.sort
    patched = interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    nothing: Any = type(patched)
    interpreter._patch_lang = lambda fn: nothing()
    interpreter.interpreter_builder.options = replace(interpreter.interpreter_builder.options, sanitize_overflow=False)
    tl.sort = sort
    return theirs


@contextmanager
def backwards() -> Iterator[None]:
    """The programs of a launch run in the opposite order, the last one first."""
    from triton.runtime import interpreter

    builder: Any = interpreter.interpreter_builder
    theirs = builder.set_grid_idx

    def set_grid_idx(x: int, y: int, z: int) -> None:
        theirs(*(size - 1 - at for size, at in zip(builder.grid_dim, (x, y, z), strict=True)))

    builder.set_grid_idx = set_grid_idx
    try:
        yield
    finally:
        builder.set_grid_idx = theirs


def sort(x: Any, dim: Any = None, descending: Any = False) -> Any:
    """`tl.sort` of one axis, by numpy."""
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    ascending = np.sort(x.handle.data, axis=-1)
    data = np.ascontiguousarray(ascending[..., ::-1]) if getattr(descending, "value", descending) else ascending
    return tl.core.tensor(TensorHandle(data, x.handle.dtype), tl.block_type(x.dtype, list(data.shape)))
