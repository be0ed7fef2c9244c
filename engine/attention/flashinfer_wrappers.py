"""Makes FlashInfer's wrappers (0.6.14), which keep a plan each, for eager steps and for captured ones.

A page is one token slot. All wrappers of a device share one workspace, since they run one after another.
"""

import math
from typing import Any, Literal, NamedTuple

import torch

from engine.attention.interface import NO_SOFTCAP
from engine.attention.plans import AttentionParams, GraphBuffers, Sequences

MIN_LENGTH = 1024  # of the constant arrays
WORKSPACE_BYTES = 384 << 20  # partial results of split sequences
TENSOR_CORE_GROUP = 4  # query heads a key/value head from which decoding on tensor cores wins
LAYOUT = "NHD"
BACKEND = "fa2"  # beats fa3 on short items, and compiles three times faster
HOPPER_BACKEND = "fa3"  # of gathered contexts
PAGE = 1
TILE_ROWS, BLOCKS, FLOAT_BYTES = 128, 2, 4  # of fa2: rows of a tile, blocks that a multiprocessor runs concurrently
Form = Literal["decode", "prefill", "ragged"]
_cuda: Any = torch.cuda  # its events carry no types


class Constants(NamedTuple):
    """Holds arrays that every step names. Longer ones replace them; a captured graph keeps those that it saw."""

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
    """Keeps the longest constants that a step of this device has needed."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._longest = Constants.of(MIN_LENGTH, device)

    def at_least(self, count: int) -> Constants:
        """Returns arrays of at least `count` entries."""
        if count > len(self._longest.ones):
            self._longest = Constants.of(1 << (count - 1).bit_length(), self._device)
        return self._longest


class PlanRecorder:
    """Passes calls on to FlashInfer's compiled module, and records the arguments of the last `plan`."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self.arguments: tuple[Any, ...] = ()

    def plan(self, *arguments: Any) -> Any:
        self.arguments = arguments
        return self._module.plan(*arguments)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


class _RecordsPlan:
    """Makes a subclass of a FlashInfer wrapper record what it gives its compiled module: the module that the wrapper
    stores in `_cached_module` is held inside a `PlanRecorder`. The library's own classes and modules stay as they
    are. FlashInfer has no public plan of lengths alone, and `_cached_module` is where its wrappers keep the module."""

    @property
    def _cached_module(self) -> PlanRecorder:
        return self.recorder

    @_cached_module.setter
    def _cached_module(self, module: Any) -> None:
        self.recorder = PlanRecorder(module)


def recording(wrapper_class: Any) -> Any:
    """Returns a subclass of this FlashInfer wrapper whose instances record their plans (`recorder`)."""
    return type(f"Recording{wrapper_class.__name__}", (_RecordsPlan, wrapper_class), {})


class Partition:
    """Plans how the device's blocks share the work of a decode step: the part of FlashInfer's plan that depends on
    lengths, and one copy. The rest, three copies and some thirty operations on small tensors, stays as in the plan
    that was recorded."""

    def __init__(self, module: PlanRecorder, kv_indptr: torch.Tensor, lengths: torch.Tensor) -> None:
        """
        Args:
            module: It has recorded a plan.
            kv_indptr: i32 [S + 1] on the host, the very tensor that this plan was given.
            lengths: i32 [S], likewise; FlashInfer passes it on where it decodes on tensor cores.

        Raises:
            ValueError: The arguments carry the sequences' lengths in another form than the two tensors.
        """
        self._module, self._arguments = module, [*module.arguments]
        self._indptrs = [at for at, one in enumerate(self._arguments) if one is kv_indptr]
        self._lengths = [at for at, one in enumerate(self._arguments) if one is lengths]
        known = {*self._indptrs, *self._lengths}
        others = (one for at, one in enumerate(self._arguments) if at not in known and isinstance(one, torch.Tensor))
        copied = any(one.device.type == "cpu" and one.shape == lengths.shape for one in others)
        if copied or not self._indptrs:
            raise ValueError("this FlashInfer shares the work of a decode step between blocks in another way")

    @classmethod
    def of(cls, wrapper: Any, kv_indptr: torch.Tensor, lengths: torch.Tensor) -> "Partition | None":
        """Returns the partition of the plan that a recording wrapper has made; None where its form is not known."""
        module = getattr(wrapper, "recorder", None)
        try:
            return None if module is None else cls(module, kv_indptr, lengths)
        except ValueError:
            return None

    def __call__(self, kv_indptr: torch.Tensor) -> None:
        """Plans for other lengths: i32 [S + 1] on the host."""
        for at in self._indptrs:
            self._arguments[at] = kv_indptr
        if self._lengths:
            lengths = kv_indptr.diff()
            for at in self._lengths:
                self._arguments[at] = lengths
        self._module.plan(*self._arguments)


class PlannedWrapper:
    """Holds a FlashInfer wrapper, and the event after which its pinned staging memory may be written again."""

    def __init__(self, wrapper: Any, form: Form, dtype: torch.dtype, constants: ConstantArrays) -> None:
        self._wrapper = wrapper
        self._form = form
        self._dtype = dtype
        self._constants = constants
        self._partition: Partition | None = None
        self._staged = _cuda.Event()
        self.run: Any = wrapper.run

    def plan(self, params: AttentionParams, sequences: Sequences) -> None:
        """Plans from the host's indptrs: FlashInfer would copy those of the device back, and wait.

        This waits for the copy of the wrapper's last plan, which was queued before the last step's kernels: a loop that
        is at most one step ahead does not block.
        """
        self._staged.synchronize()
        qo_indptr, kv_indptr, kv_indices, causal = sequences
        count = len(kv_indptr) - 1
        last_page = self._constants.at_least(count).host_ones[:count]
        shape, pages = (params.heads, params.kv_heads, params.dim), (kv_indptr, kv_indices, last_page)
        options: dict[str, Any] = {
            "window_left": params.window_left,
            "logits_soft_cap": params.softcap if params.softcap != NO_SOFTCAP else None,
            "sm_scale": params.scale,
            "q_data_type": self._dtype,
            "kv_data_type": self._dtype,
            "non_blocking": True,
        }
        if self._form == "decode":
            lengths = kv_indptr.diff()
            self._wrapper.plan(*pages, *shape, page_size=PAGE, seq_lens=lengths, **options)
            if self._partition is None:
                self._partition = Partition.of(self._wrapper, kv_indptr, lengths)
        else:
            longest = int(qo_indptr.diff().max())  # FlashInfer would look for it one sequence after another
            options |= {"causal": causal, "max_token_per_sequence": longest}
            if self._form == "ragged":
                self._wrapper.plan(qo_indptr, kv_indptr, *shape, **options)
            else:  # fa2 reads no lengths, and FlashInfer would look for the largest one after another
                self._wrapper.plan(qo_indptr, *pages, *shape, page_size=PAGE, seq_lens=last_page[:1], **options)
        self._staged.record()

    @property
    def can_replan(self) -> bool:
        """Whether this version of FlashInfer plans in a form that `Partition` knows; false before the first `plan`."""
        return self._partition is not None

    def replan(self, kv_indptr: torch.Tensor) -> None:
        """Plans for other lengths of as many sequences; see `GraphDecoder`.

        Raises:
            RuntimeError: This version of FlashInfer plans in a form that `Partition` does not know.
        """
        if self._partition is None:
            raise RuntimeError("this wrapper cannot plan a part alone")
        self._partition(kv_indptr)


class Wrappers:
    """Makes the wrappers of one device and dtype. `lib` is FlashInfer."""

    def __init__(self, lib: Any, device: torch.device, dtype: torch.dtype, constants: ConstantArrays) -> None:
        self._lib, self._device, self._dtype, self._constants = lib, device, dtype, constants
        self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)

    def decoder(self, params: AttentionParams) -> PlannedWrapper:
        """Makes a decode wrapper of eager steps."""
        return self._decoder(self._lib.BatchDecodeWithPagedKVCacheWrapper, params, None)

    def prefiller(self, form: Form, staging: int | None = None, **graph: Any) -> PlannedWrapper:
        """Makes a prefill wrapper; `graph` holds FlashInfer's buffers of captured steps."""
        if form == "ragged":
            wrapper = self._lib.BatchPrefillWithRaggedKVCacheWrapper(self._workspace, LAYOUT, backend=HOPPER_BACKEND)
        else:
            wrapper = self._lib.BatchPrefillWithPagedKVCacheWrapper(self._workspace, LAYOUT, backend=BACKEND, **graph)
        return self._planned(wrapper, form, staging)

    def graph_decoder(self, params: AttentionParams, buffers: GraphBuffers, rows: int) -> PlannedWrapper:
        """Makes a decode wrapper whose plan lies in `buffers`, so that a captured graph reads the next plan. It can
        `replan` once it has planned."""
        return self._decoder(
            recording(self._lib.BatchDecodeWithPagedKVCacheWrapper),
            params,
            buffers.staging,
            use_cuda_graph=True,
            paged_kv_indptr_buffer=buffers.indptr[: rows + 1],
            paged_kv_indices_buffer=buffers.indices,
            paged_kv_last_page_len_buffer=buffers.last_page[:rows],
        )

    def graph_prefiller(self, buffers: GraphBuffers, queries: torch.Tensor) -> PlannedWrapper:
        """Makes a prefill wrapper whose plan lies in `buffers`.

        Args:
            buffers: For as many sequences and attended tokens as a step may have.
            queries: i32 [S + 1] on the device, where each sequence ends. Sequences may be empty; every plan has the
                same number of tokens.
        """
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

    def max_sequences(self, params: AttentionParams, tokens: int) -> int:
        """Returns how many sequences a captured prefill step of `tokens` tokens may have, however these are cut.

        FlashInfer plans for one tile a sequence beside those that the tokens fill, and for one a block that the device
        runs concurrently; the workspace holds the partial results of all. Below 1 the step cannot be captured.
        """
        tiles = WORKSPACE_BYTES // (params.heads * TILE_ROWS * (params.dim + 1) * FLOAT_BYTES)
        cuda = self._device.type == "cuda"
        blocks = BLOCKS * torch.cuda.get_device_properties(self._device).multi_processor_count if cuda else 0
        if blocks // params.kv_heads > tiles:
            return 0
        return tiles + 1 - math.ceil(tokens * (params.heads // params.kv_heads) / TILE_ROWS)

    def _decoder(
        self, wrapper_class: Any, params: AttentionParams, staging: int | None, **graph: Any
    ) -> PlannedWrapper:
        tensor_cores = params.heads // params.kv_heads >= TENSOR_CORE_GROUP
        wrapper = wrapper_class(self._workspace, LAYOUT, use_tensor_cores=tensor_cores, backend=BACKEND, **graph)
        return self._planned(wrapper, "decode", staging)

    def _planned(self, wrapper: Any, form: Form, staging: int | None) -> PlannedWrapper:
        """Gives the wrapper `staging` bytes for its plans; None leaves it FlashInfer's own 8 MiB."""
        if staging is not None:
            staged = torch.empty(staging, dtype=torch.uint8, device=self._device)
            wrapper.reset_workspace_buffer(self._workspace, staged)
        return PlannedWrapper(wrapper, form, self._dtype, self._constants)
