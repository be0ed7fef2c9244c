"""BackgroundCompile: while a start-up on a GPU does other things, a process of its own compiles the sampler's kernels.

One after another they take a minute or two of one core; beside each other, as long as the longest of them. The process
has neither CUDA nor the model and writes into Triton's cache alone, so that a failure of it costs speed and nothing
else: what it leaves out is compiled where it is launched.
"""

import logging
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Final

import torch

from engine.config import EngineConfig
from engine.model.interface import CausalLM, StartupProgress
from engine.model.lm_head import HeadSpec
from engine.utils.cpu import cores

log = logging.getLogger(__name__)

STAGE: Final = "kernels ahead"
MAX_PROCESSES: Final = 16  # 0.4 GB each
MIN_CORES: Final = 4  # two compile, and two are left to the start-up itself
LONGEST_S: Final = 300.0
COMMAND: Final = (sys.executable, "-P", "-m", "engine.warmup.precompile_kernels")


def ahead_of(model: CausalLM, config: EngineConfig) -> "BackgroundCompile":
    """Of this replica's kernels; of none where there is no GPU or are no cores for it."""
    on_gpu = model.device.type == "cuda" and torch.cuda.is_available() and config.sampler_backend != "numpy"
    if not on_gpu or cores() < MIN_CORES:
        return BackgroundCompile(None)
    major, minor = torch.cuda.get_device_capability(model.device)
    return BackgroundCompile(arguments_for(model, config, f"{major}.{minor}"))


def arguments_for(model: CausalLM, config: EngineConfig, capability: str) -> list[str]:
    """Of `engine.warmup.precompile_kernels`, for what this replica will launch."""
    speculation = config.speculation
    drafts = 0 if speculation.method == "none" else speculation.num_speculative_tokens
    given = {
        "--capabilities": capability,
        "--vocab-sizes": model.vocab_size,
        "--dtype": str(model.dtype).removeprefix("torch."),
        "--max-running": config.max_running,
        "--overlay-entries": config.overlay_entries,
        "--drafts": drafts,
        "--rule": speculation.rejection_sample_method,
        "--seeded-rule": speculation.seeded_rejection_sample_method,
        "--processes": max(1, min(cores() - 2, MAX_PROCESSES)),
    }
    processed = ["--processed"] if config.logprobs_mode == "processed_logprobs" else []
    return [word for pair in given.items() for word in map(str, pair)] + processed + _head_arguments(model.head)


def _head_arguments(head: HeadSpec | None) -> list[str]:
    if head is None:
        return ["--no-head"]
    found = {"--head-bias": head.bias is not None, "--head-scaled": head.scale != 1.0, "--head-capped": head.softcap}
    return [name for name, given in found.items() if given]


class BackgroundCompile:
    """Started on entry; ended with the block, whatever ends that. Without arguments there is no process."""

    def __init__(
        self, arguments: Sequence[str] | None, command: Sequence[str] = COMMAND, timeout_s: float = LONGEST_S
    ) -> None:
        self._command = None if arguments is None else (*command, *arguments)
        self._timeout_s = timeout_s
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> "BackgroundCompile":
        if self._command is None:
            return self
        paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
        environment = os.environ | {"PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        try:
            self._process = subprocess.Popen(
                self._command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        except OSError as error:
            _warn(error)
        return self

    def wait(self, progress: StartupProgress) -> None:
        """Until all are compiled. Raises nothing; `progress` is told how long this took."""
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
            log.info("Kernels ahead: %s.", last)
        progress(STAGE, time.perf_counter() - started)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None:
            if self._process.poll() is None:
                self._process.kill()
            self._process.communicate()


def _warn(why: object) -> None:
    log.warning("Kernels were not compiled ahead, and will be one by one: %s.", why)
