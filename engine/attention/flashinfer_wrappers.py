"""Wrappers: makes FlashInfer's wrappers (0.6.14), each of which keeps a plan, for eager steps and for captured ones.

A page is one token slot. All wrappers of a device share one workspace, since they run one after another.

ConstantArrays: arrays that every step names and none changes.

Partition: of FlashInfer's plan of a decode step the part that depends on lengths.
"""

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Literal, NamedTuple

import torch

from engine.attention.interface import NO_SOFTCAP
from engine.attention.plans import GraphBuffers, Kind, Sequences

LEAST = 1024


class Constants(NamedTuple):
    """Replaced by longer ones, never changed: a captured graph keeps those it saw."""

    rows: torch.Tensor  # i32 [n + 1]: 0, 1, 2, ...
    zeros: torch.Tensor  # i32 [n]
    ones: torch.Tensor  # i32 [n]
    host_ones: torch.Tensor  # i32 [n], pinned

    @classmethod
    def of(cls, count: int, device: torch.device) -> "Constants":
        return cls(
            rows=torch.arange(count + 1, dtype=torch.int32, device=device),
            zeros=torch.zeros(count, dtype=torch.int32, device=device),
            ones=torch.ones(count, dtype=torch.int32, device=device),
            host_ones=torch.ones(count, dtype=torch.int32, pin_memory=device.type == "cuda"),
        )


class ConstantArrays:
    """The longest that a step of this device has asked for."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._longest = Constants.of(LEAST, device)

    def at_least(self, count: int) -> Constants:
        """Arrays of at least `count` entries."""
        if count > len(self._longest.ones):
            self._longest = Constants.of(1 << (count - 1).bit_length(), self._device)
        return self._longest


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


WORKSPACE_BYTES = 384 << 20  # partial results of split sequences
TENSOR_CORE_GROUP = 4  # query heads a key/value head from which decoding on tensor cores wins
LAYOUT = "NHD"
BACKEND = "fa2"  # beats fa3 on short items, and compiles three times faster
HOPPER_BACKEND = "fa3"  # of gathered contexts
PAGE = 1
MOST_TILE, BLOCKS, FLOAT_BYTES = 128, 2, 4  # of fa2: rows of a tile, blocks that a multiprocessor runs at once
Form = Literal["decode", "prefill", "ragged"]
_cuda: Any = torch.cuda  # its events carry no types


class PlannedWrapper:
    """A FlashInfer wrapper, and the event after which its pinned staging memory may be written again."""

    def __init__(
        self, wrapper: Any, form: Form, dtype: torch.dtype, constants: ConstantArrays, *, repeats: bool = False
    ) -> None:
        """`repeats`: it will `replan`."""
        self._wrapper = wrapper
        self._form = form
        self._dtype = dtype
        self._constants = constants
        self._repeats = repeats
        self._partition: Partition | None = None
        self._staged = _cuda.Event()
        self.run: Any = wrapper.run

    def plan(self, kind: Kind, given: Sequences) -> None:
        """Plans from the host's indptrs: device ones would be copied back, and waited for.

        What is waited for is the copy of this wrapper's last plan, which was queued before the last step's kernels: a
        loop that is at most one step ahead finds it done.
        """
        self._staged.synchronize()
        sequences = len(given.kv_indptr) - 1
        last_page = self._constants.at_least(sequences).host_ones[:sequences]
        shape = (kind.heads, kind.kv_heads, kind.dim)
        same: dict[str, Any] = {
            "window_left": kind.window_left,
            "logits_soft_cap": kind.softcap if kind.softcap != NO_SOFTCAP else None,
            "sm_scale": kind.scale,
            "q_data_type": self._dtype,
            "kv_data_type": self._dtype,
            "non_blocking": True,
        }
        if self._form == "decode":
            lengths = given.kv_indptr.diff()
            pages = (given.kv_indptr, given.kv_indices, last_page)
            plan = partial(self._wrapper.plan, *pages, *shape, page_size=PAGE, seq_lens=lengths, **same)
            plan()
            if self._repeats and self._partition is None:
                module = getattr(self._wrapper, "_cached_module", None)
                self._partition = Partition.of(module, plan, given.kv_indptr, lengths)
        else:
            longest = int(given.qo_indptr.diff().max())  # sought in the same way
            same |= {"causal": given.causal, "max_token_per_sequence": longest}
            if self._form == "ragged":
                self._wrapper.plan(given.qo_indptr, given.kv_indptr, *shape, **same)
            else:  # fa2 reads no lengths, of which the library seeks the largest one after another
                pages, none = (given.kv_indptr, given.kv_indices, last_page), last_page[:1]
                self._wrapper.plan(given.qo_indptr, *pages, *shape, page_size=PAGE, seq_lens=none, **same)
        self._staged.record()

    def replan(self, kv_indptr: torch.Tensor) -> None:
        """As `plan` for other lengths of as many sequences, where the buffers hold all that is attended to already and
        the copy of the last plan has ended."""
        if self._partition is None:
            raise RuntimeError("this wrapper cannot plan a part alone")
        self._partition(kv_indptr)


class Wrappers:
    """Makes those of one device and dtype. `lib` is FlashInfer."""

    def __init__(self, lib: Any, device: torch.device, dtype: torch.dtype, constants: ConstantArrays) -> None:
        self._lib, self._device, self._dtype, self._constants = lib, device, dtype, constants
        self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)

    def decoder(self, kind: Kind, staging: int | None = None, **graph: Any) -> PlannedWrapper:
        wrapper = self._lib.BatchDecodeWithPagedKVCacheWrapper(
            self._workspace,
            LAYOUT,
            use_tensor_cores=kind.heads // kind.kv_heads >= TENSOR_CORE_GROUP,
            backend=BACKEND,
            **graph,
        )
        return self._planned(wrapper, "decode", staging, repeats=bool(graph))

    def prefiller(self, form: Form, staging: int | None = None, **graph: Any) -> PlannedWrapper:
        if form == "ragged":
            wrapper = self._lib.BatchPrefillWithRaggedKVCacheWrapper(self._workspace, LAYOUT, backend=HOPPER_BACKEND)
        else:
            wrapper = self._lib.BatchPrefillWithPagedKVCacheWrapper(self._workspace, LAYOUT, backend=BACKEND, **graph)
        return self._planned(wrapper, form, staging)

    def graph_decoder(self, kind: Kind, buffers: GraphBuffers, rows: int) -> PlannedWrapper:
        """A decode wrapper whose plan lives in `buffers`, so that a captured graph sees the next plan. Once it has
        planned, it can `replan`."""
        return self.decoder(
            kind,
            buffers.staging,
            use_cuda_graph=True,
            paged_kv_indptr_buffer=buffers.indptr[: rows + 1],
            paged_kv_indices_buffer=buffers.indices,
            paged_kv_last_page_len_buffer=buffers.last_page[:rows],
        )

    def graph_prefiller(self, buffers: GraphBuffers, queries: torch.Tensor) -> PlannedWrapper:
        """The same for sequences of several tokens, empty ones among them, that together are as many tokens in every
        plan; where each ends stands in `queries`, i32 [sequences + 1] on the device."""
        sequences = len(queries) - 1
        return self.prefiller(
            "prefill",
            buffers.staging,
            use_cuda_graph=True,
            qo_indptr_buf=queries,
            paged_kv_indptr_buf=buffers.indptr[: sequences + 1],
            paged_kv_indices_buf=buffers.indices,
            paged_kv_last_page_len_buf=buffers.last_page[:sequences],
        )

    def most_sequences(self, kind: Kind, tokens: int) -> int:
        """Of a captured step of `tokens` tokens, those whose partial results the workspace holds, however they are cut:
        the library plans for one tile a sequence beside those that the tokens fill, and for one a block that the device
        runs at once. Below 1 where it cannot be captured."""
        tiles = WORKSPACE_BYTES // (kind.heads * MOST_TILE * (kind.dim + 1) * FLOAT_BYTES)
        cuda = self._device.type == "cuda"
        blocks = BLOCKS * torch.cuda.get_device_properties(self._device).multi_processor_count if cuda else 0
        if blocks // kind.kv_heads > tiles:
            return 0
        return tiles + 1 - math.ceil(tokens * (kind.heads // kind.kv_heads) / MOST_TILE)

    def _planned(self, wrapper: Any, form: Form, staging: int | None, *, repeats: bool = False) -> PlannedWrapper:
        """The wrapper, with `staging` bytes for its plans, or as many as it takes."""
        if staging is not None:
            room = torch.empty(staging, dtype=torch.uint8, device=self._device)
            wrapper.reset_workspace_buffer(self._workspace, room)
        return PlannedWrapper(wrapper, form, self._dtype, self._constants, repeats=repeats)
