"""Compiles kernels that the first model of a service, and its draft, need on this machine's GPU, while Ray starts.

On a GPU that has never served such a model, FlashInfer's attention modules and the sampler's kernels take longer than
all else of a start. A replica compiles them too, once it has loaded the model, and waits for those that are on the way
here. Nothing depends on this: it has no say in whether the service starts, and what it does not foresee by the model's
config.json is compiled there.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from typing import Any, Final

from deployments.cli.check.arguments import arguments_of
from deployments.config.app_args import AppArgs
from engine.config import ARCHITECTURES, EngineConfig, ModelConfig
from engine.model.model_folder import BadCheckpoint, ModelNotFound, find_draft_folder, find_folder
from engine.utils.cpu import cores
from engine.warmup.background_compile import KERNELS, MIN_CORES, RUN, arguments_for, environment
from engine.warmup.foreseen import HALVES, foresee

ATTENTION: Final = "engine.warmup.precompile_flashinfer"
CAPABILITIES: Final = ("nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader")
CAPABILITIES_S: Final = 10.0
NICENESS: Final = 5  # Ray's processes start beside the compilers


@contextlib.contextmanager
def compiling(config: dict[str, Any]) -> Iterator[None]:
    """Compiles what the first model of a Serve config needs on this machine's GPU, until the block ends."""
    commands, variables = commands_for(config)
    with contextlib.ExitStack() as running:
        for command in commands:
            running.callback(_end, _started(command, variables))
        yield


def _started(command: Sequence[str], variables: dict[str, str]) -> "subprocess.Popen[bytes]":
    process = subprocess.Popen(
        command,
        env=environment() | variables,
        stdin=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,  # a replica says what does not compile
        start_new_session=True,  # with its compilers, which end with it
    )
    with contextlib.suppress(OSError):  # it has ended, or a sandbox forbids it
        os.setpriority(os.PRIO_PROCESS, process.pid, NICENESS)
    threading.Thread(target=process.wait, daemon=True).start()  # nothing is left of it once it has ended
    return process


def _end(process: "subprocess.Popen[bytes]") -> None:
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):  # it ends
            os.killpg(process.pid, signal.SIGTERM)
    process.wait()


def commands_for(config: dict[str, Any]) -> tuple[list[list[str]], dict[str, str]]:
    """Returns the commands for this machine, and their variables: none without a GPU, or where it is not known how."""
    served = [args for _, args, _ in arguments_of(config) if args is not None]
    if not served or served[0].model.device == "cpu":
        return [], {}
    named = os.environ.get(ARCHITECTURES) or _capability()
    if named is None:
        return [], {}
    try:
        foreseen = commands_of(served[0], named.split())
    except (ModelNotFound, BadCheckpoint, OSError):  # which the check of the model reports
        return [], {}
    possible = {ATTENTION: find_spec("flashinfer") is not None, KERNELS: cores() >= MIN_CORES}
    return [[*RUN, *command] for command in foreseen if possible[command[0]]], {ARCHITECTURES: named}


def commands_of(args: AppArgs, architectures: Sequence[str]) -> list[list[str]]:
    """Returns the modules, with their arguments, that compile without a GPU what a model's config.json foresees.

    Raises:
        ModelNotFound: There is no folder of the model.
        BadCheckpoint: Its config.json is damaged.
        OSError: It cannot be read.
    """
    model, engine, folder = args.model, args.engine_config(), find_folder(args.model)
    commands = []
    # For other dtypes than halves, and for invariant numerics, something else computes attention.
    if model.dtype in ("auto", *HALVES) and engine.numerics == "fast" and (folder / "config.json").is_file():
        dtypes = () if model.dtype == "auto" else ("--dtypes", model.dtype)
        folders = [str(folder), *_draft_folders(engine)]
        commands.append([ATTENTION, "--model", *folders, *dtypes])
    logits = model.dtype if engine.numerics == "fast" else "float32"
    found = foresee(folder, logits) if model.head == "auto" else None
    if found is not None and engine.sampler.backend != "numpy":
        commands.append([KERNELS, *arguments_for(found, engine, architectures)])
    return commands


def _draft_folders(engine: EngineConfig) -> list[str]:
    """Returns the folder of the draft model; none without one, or where the check of the model reports why not."""
    draft = engine.speculation
    if draft.draft is None:
        return []
    try:
        folder = find_draft_folder(ModelConfig(path=draft.draft, revision=draft.draft_revision))
    except ModelNotFound:
        return []
    return [str(folder)] if (folder / "config.json").is_file() else []


def _capability() -> str | None:
    """Returns that of this machine's GPUs, as 9.0; None where they differ: modules of one folder are for one kind."""
    if shutil.which(CAPABILITIES[0]) is None:
        return None
    try:
        said = subprocess.run(CAPABILITIES, capture_output=True, text=True, timeout=CAPABILITIES_S, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    found = set(said.split())
    return found.pop() if len(found) == 1 else None
