"""Writes runs of words into the device's copy of the sampling state.

Grid (runs, chunks of the longest run): a program writes 1,024 words of one run, or none where its run is shorter. Runs
do not overlap, so no order among them matters. Bytes: 8 a word and 12 a run.

    words[destination + i] = payload[source + i]   for 0 <= i < length

| pointer | shape, type | |
|---|---|---|
| words | i32 [*] | write |
| runs | i32 [N, 3]: destination, source, length | read |
| payload | i32 [*] | read |
"""

import torch
import triton
import triton.language as tl

RUN_WORDS = 3
_CHUNK: tl.constexpr = tl.constexpr(1024)
_RUN_WORDS: tl.constexpr = tl.constexpr(RUN_WORDS)


@triton.jit(do_not_specialize_on_alignment=["payload"])  # it begins behind any number of runs
def _scatter_state_kernel(words, runs, payload, CHUNK: tl.constexpr):
    run = runs + tl.program_id(0) * _RUN_WORDS
    destination = tl.load(run)
    source = tl.load(run + 1)
    at = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    inside = at < tl.load(run + 2)
    tl.store(words + destination + at, tl.load(payload + source + at, mask=inside, other=0), mask=inside)


def scatter_state(words: torch.Tensor, packed: torch.Tensor, *, runs: int, longest: int) -> None:
    """Writes runs of words. It reads nothing back from the device.

    Args:
        words: i32 [*], the buffer.
        packed: i32 [3 runs + payload]: each run as (destination, source in the payload, length), then the payload. The
            caller vouches that the runs lie within `words`.
        runs: their number.
        longest: the length of the longest run.

    Raises:
        ValueError: a tensor is of another kind.
    """
    for name, tensor in (("words", words), ("packed", packed)):
        if tensor.dtype != torch.int32 or tensor.ndim != 1 or tensor.device != words.device:
            got = f"{tensor.dtype} {tuple(tensor.shape)} on {tensor.device}"
            raise ValueError(f"got {name} {got}, expected int32 (*) on {words.device}")
    if runs < 0 or len(packed) < RUN_WORDS * runs:
        raise ValueError(f"got {runs} runs and {len(packed)} words of them, expected {RUN_WORDS} words a run")
    if runs and longest:
        grid = (runs, triton.cdiv(longest, _CHUNK.value))
        _scatter_state_kernel[grid](words, packed, packed[RUN_WORDS * runs :], CHUNK=_CHUNK, num_warps=4)
