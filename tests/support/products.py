"""Makes products of Triton's interpreter, which are those of the machine's BLAS, those of a GPU in one respect: a
number is summed in one order wherever it stands. A BLAS has kernels, chosen by the processor, for which that depends on
its row and column."""

from typing import Any

import numpy as np


def leave_blas() -> None:
    """Patches the interpreter of this process; TRITON_INTERPRET=1 is set before Triton is imported."""
    from triton.runtime import interpreter

    interpreter.interpreter_builder.create_dot = dot


def dot(a: Any, b: Any, d: Any, input_precision: object, most_imprecise: object) -> Any:
    """`tl.dot`, [..., M, K] times [..., K, N] on top of d: one addend of all sums after another."""
    from triton.runtime.interpreter import TensorHandle

    x, y = (one.data.astype(d.data.dtype, copy=False) for one in (a, b))
    sums, addend = d.data.copy(), np.empty_like(d.data)
    for k in range(x.shape[-1]):
        np.multiply(x[..., :, k, None], y[..., k, None, :], out=addend)
        sums += addend
    return TensorHandle(sums, d.dtype.scalar)
