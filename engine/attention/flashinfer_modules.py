"""Compiles the FlashInfer modules that the attention layers of a model need, before their first use.

Each module has a folder, a ninja and a lock of FlashInfer's: they compile concurrently, and a caller that needs one
meanwhile waits for that one alone. A step that needs one that is not there compiles it, one after another.
"""

import logging
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import suppress
from threading import Event, Thread, get_native_id
from typing import Any, Final, NamedTuple

import torch

from engine.attention.flashinfer_backend import HOPPER
from engine.attention.flashinfer_wrappers import BACKEND, HOPPER_BACKEND
from engine.config import ARCHITECTURES
from engine.utils.cpu import cores

log = logging.getLogger(__name__)

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
INDEX = torch.int32
NO_POSITIONS = 0  # attention receives rotated queries and keys
MAX_CONCURRENT_BUILDS: Final = 16
COMPILERS_A_CORE: Final = 2  # they take a GB or more each; with one a core, cores would be idle at the end
LATER: Final = ("contexts", "cascade")  # no start waits for these
NICENESS, LATER_NICENESS = 5, 15  # of compilers: Ray's processes start beside them, and a start waits for most of them


class ModuleShape(NamedTuple):
    """Holds what the code of an attention module depends on."""

    dtype: str
    dim: int
    window: bool
    softcap: bool

    @property
    def name(self) -> str:
        extras = f"{', window' if self.window else ''}{', soft cap' if self.softcap else ''}"
        return f"{self.dtype}, head dim {self.dim}{extras}"


def modules(shapes: Sequence[ModuleShape], sampling: bool) -> Iterator[tuple[str, Any]]:
    """Yields (name, FlashInfer's specification) of each module that the engine may use for these shapes."""
    from flashinfer import jit
    from flashinfer.jit.cascade import gen_cascade_module
    from flashinfer.jit.page import gen_page_module

    yield "pages", gen_page_module()
    yield "cascade", gen_cascade_module()
    for shape in shapes:
        dtype = DTYPES[shape.dtype]
        what = (dtype, dtype, dtype, INDEX, shape.dim, shape.dim, NO_POSITIONS, shape.window, shape.softcap)
        yield f"prefill, {shape.name}", jit.gen_batch_prefill_module(BACKEND, *what, False)
        yield f"decode, {shape.name}", jit.gen_batch_decode_module(*what)
        if _for_hopper():
            no_window = (*what[:7], False, shape.softcap)
            yield f"contexts, {shape.name}", jit.gen_batch_prefill_module(HOPPER_BACKEND, *no_window, False)
    if sampling:
        from flashinfer.jit.sampling import gen_sampling_module

        yield "sampling", gen_sampling_module()


def missing(shapes: Sequence[ModuleShape], sampling: bool) -> list[tuple[str, Any]]:
    """Returns those of `modules` that are not compiled."""
    return [(name, module) for name, module in modules(shapes, sampling) if not module.is_compiled]


def _for_hopper() -> bool:
    """Returns whether the modules are for GPUs of the Hopper architecture."""
    named = os.environ.get(ARCHITECTURES)
    if named:
        return any(one.partition(".")[0] == str(HOPPER) for one in named.split())
    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == HOPPER


class Built(NamedTuple):
    """Says how a module's compilation ended."""

    seconds: float
    error: Exception | None


def _build(module: Any, later: bool) -> Built:
    """Compiles a module. `later`: its compilers give way to those of others."""
    started = time.perf_counter()
    error = None
    thread = os.PRIO_PROCESS, get_native_id()  # and what it starts
    with suppress(OSError):  # a sandbox may forbid it
        os.setpriority(*thread, max(os.getpriority(*thread), LATER_NICENESS if later else NICENESS))
    try:
        module.build(verbose=False)
    except Exception as raised:  # the others go on
        error = raised
    return Built(time.perf_counter() - started, error)


def _is_for_later(named: tuple[str, Any]) -> bool:
    return named[0].startswith(LATER)


def _compilers_a_module(files: Sequence[int], most: int) -> int:
    """Returns the most compilers of each module, at least one, that are together at most `most`.

    `files` are the sources of the modules that compile concurrently: one of few files leaves its share to the others.
    """
    fitting = [each for each in range(1, max(files, default=1) + 1) if sum(min(one, each) for one in files) <= most]
    return max(fitting, default=1)


def build(named: Sequence[tuple[str, Any]], processes: int, *, all_urgent: bool = False) -> list[str]:
    """Compiles modules, `processes` concurrently, and prints a line as each ends. Returns the names of failed ones.

    `all_urgent`: those that no start waits for do not give way to other processes either.
    """
    concurrent = max(1, min(processes, len(named)))
    files = sorted((len(module.sources) for _, module in named), reverse=True)[:concurrent]
    os.environ.setdefault("MAX_JOBS", str(_compilers_a_module(files, COMPILERS_A_CORE * cores())))
    failed = []
    with ThreadPoolExecutor(concurrent) as threads:
        ordered = sorted(named, key=_is_for_later)
        names = {
            threads.submit(_build, module, _is_for_later((name, module)) and not all_urgent): name
            for name, module in ordered
        }
        for done in as_completed(names):
            name, built = names[done], done.result()
            if built.error is None:
                print(f"FlashInfer module {name}: {built.seconds:.1f} s", flush=True)
            else:
                failed.append(name)
                said = f"FlashInfer module {name}: failed after {built.seconds:.1f} s: {built.error}"
                print(said, file=sys.stderr, flush=True)
    return failed


class BackgroundBuild:
    """Compiles what these shapes lack, concurrently and beside the rest of a start-up, in compilers of their own.

    Raises nothing: a module that fails is compiled again at its first use, which raises.
    """

    def __init__(self, shapes: Iterable[ModuleShape]) -> None:
        self.ended = Future[list[str]]()  # the names of modules that failed, or what else did
        self._delays_start = False
        self._listed = Event()
        Thread(target=self._run, args=(sorted(set(shapes)),), name="flashinfer-build", daemon=True).start()

    @property
    def delays_start(self) -> bool:
        """Whether modules were missing that a start waits for. It waits until that is known."""
        self._listed.wait()
        return self._delays_start

    def _run(self, shapes: Sequence[ModuleShape]) -> None:
        try:
            try:
                lacking = missing(shapes, sampling=False)
                self._delays_start = not all(map(_is_for_later, lacking))
            finally:
                self._listed.set()
            self.ended.set_result(build(lacking, min(cores(), MAX_CONCURRENT_BUILDS)) if lacking else [])
        except Exception as error:  # of the library's own kinds
            log.warning("FlashInfer's modules are compiled at their first use: %s: %s.", type(error).__name__, error)
            self.ended.set_exception(error)
