"""Compiles the sampler's Triton kernels in a process of its own, while a start-up on a GPU does other things.

Gain: one after another the kernels take a minute or two of one core; compiled concurrently, as long as the longest. The
process has neither CUDA nor the model and writes to Triton's cache alone. If it fails, kernels are compiled where they
are launched, which takes longer and changes nothing else. It has no switch: there is none on a CPU, with the numpy
sampler, or with fewer than four cores.
"""

import logging
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Final

from engine.config import EngineConfig
from engine.utils.cpu import cores
from gpu_sampler.startup_progress import StartupProgress

if TYPE_CHECKING:  # the process that compiles has no use for the library of models, which takes seconds to import
    from engine.model.interface import CausalLM
    from engine.model.lm_head import HeadSpec
    from engine.warmup.foreseen import Foreseen, ForeseenHead

log = logging.getLogger(__name__)

STAGE: Final = "background compile"
MAX_PROCESSES: Final = 16  # 0.4 GB each
MIN_CORES: Final = 4  # two compile, and two are left to the start-up itself
TIMEOUT_S: Final = 300.0
RUN: Final = (sys.executable, "-P", "-m")
KERNELS: Final = "engine.warmup.precompile_kernels"
COMMAND: Final = (*RUN, KERNELS)


def background_compile_for(model: "CausalLM", config: EngineConfig) -> "BackgroundCompile":
    """Returns the compilation of this replica's kernels, or an empty one where there is no GPU or are too few cores."""
    import torch  # which `assay serve` does without

    on_gpu = model.device.type == "cuda" and torch.cuda.is_available() and config.sampler.backend != "numpy"
    if not on_gpu or cores() < MIN_CORES:
        return BackgroundCompile(None)
    major, minor = torch.cuda.get_device_capability(model.device)
    return BackgroundCompile(arguments_for(model, config, [f"{major}.{minor}"]))


def arguments_for(model: "CausalLM | Foreseen", config: EngineConfig, capabilities: Sequence[str]) -> list[str]:
    """Returns the arguments of `engine.warmup.precompile_kernels` for the kernels that a replica launches."""
    speculation = config.speculation
    drafts = 0 if speculation.method == "none" else speculation.num_speculative_tokens
    given = {
        "--vocab-sizes": model.vocab_size,
        "--dtype": str(model.dtype).removeprefix("torch."),
        "--max-running": config.max_running,
        "--overlay-entries": config.sampler.overlay_entries,
        "--drafts": drafts,
        "--rule": speculation.rejection_sample_method,
        "--seeded-rule": speculation.seeded_rejection_sample_method,
        "--processes": max(1, min(cores() - 2, MAX_PROCESSES)),
    }
    processed = ["--processed"] if config.sampler.logprobs_mode == "processed_logprobs" else []
    words = [word for pair in given.items() for word in map(str, pair)]
    return ["--capabilities", *capabilities, *words, *processed, *_head_arguments(model.head)]


def _head_arguments(head: "HeadSpec | ForeseenHead | None") -> list[str]:
    if head is None:
        return ["--no-head"]
    found = {"--head-bias": head.bias is not None, "--head-scaled": head.scale != 1.0, "--head-capped": head.softcap}
    return [name for name, given in found.items() if given]


def environment() -> dict[str, str]:
    """Returns the environment of a process that compiles: it finds this one's modules, and has no GPU."""
    paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
    return os.environ | {"PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


class BackgroundCompile:
    """Starts the process on entry and ends it with the block. Without arguments there is no process."""

    def __init__(
        self, arguments: Sequence[str] | None, command: Sequence[str] = COMMAND, timeout_s: float = TIMEOUT_S
    ) -> None:
        self._command = None if arguments is None else (*command, *arguments)
        self._timeout_s = timeout_s
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> "BackgroundCompile":
        if self._command is None:
            return self
        try:
            self._process = subprocess.Popen(
                self._command,
                env=environment(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        except OSError as error:
            _warn(error)
        return self

    def wait(self, progress: StartupProgress) -> None:
        """Waits until all are compiled, and reports how long that took. Raises nothing."""
        if self._process is None:
            return
        started = time.perf_counter()
        try:
            said, _ = self._process.communicate(timeout=self._timeout_s)
        except subprocess.TimeoutExpired:
            _warn(f"not done after {self._timeout_s:.0f} s")
            return
        last = said.strip().rpartition("\n")[2]
        if self._process.returncode:
            _warn(last or f"it ended with {self._process.returncode}")
        else:
            log.info("Background compile: %s.", last)
        progress(STAGE, time.perf_counter() - started)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None:
            if self._process.poll() is None:
                self._process.kill()
            self._process.communicate()


def _warn(why: object) -> None:
    log.warning("Kernels were not compiled in the background and will be one by one: %s.", why)
