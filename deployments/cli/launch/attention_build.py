"""Compiles the attention modules that FlashInfer lacks for a model, while Ray starts.

On a GPU that has never served such a model they take longer than all else of a start. A replica compiles them too, once
it has loaded the model, and waits for those that are on the way here. Nothing depends on this: it has no say in whether
the service starts, and a module that it does not foresee is compiled there.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any, Final

from deployments.cli.check.arguments import arguments_of
from deployments.config.app_args import AppArgs
from engine.config import ARCHITECTURES
from engine.model.model_folder import ModelNotFound, find_folder
from engine.warmup.foreseen import HALVES

MODULE: Final = "engine.warmup.precompile_flashinfer"
RUN: Final = (sys.executable, "-P", "-m")
COMMAND: Final = (*RUN, MODULE)
CAPABILITIES: Final = ("nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader")
CAPABILITIES_S: Final = 10.0


@contextlib.contextmanager
def compiling(config: dict[str, Any]) -> Iterator[None]:
    """Compiles what the first model of a Serve config needs on this machine's GPU, until the block ends."""
    command = command_for(config)
    if command is None:
        yield
        return
    arguments, environment = command
    paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
    process = subprocess.Popen(
        arguments,
        env=os.environ | environment | {"PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": ""},
        stdin=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,  # a replica says what does not compile
        start_new_session=True,  # with its compilers, which end with it
    )
    threading.Thread(target=process.wait, daemon=True).start()  # nothing is left of it once it has ended
    try:
        yield
    finally:
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it ends
                os.killpg(process.pid, signal.SIGTERM)
        process.wait()


def command_for(config: dict[str, Any]) -> tuple[list[str], dict[str, str]] | None:
    """Returns the command and its variables; None where no model is served by FlashInfer, or it is not known how."""
    served = [args for _, args, _ in arguments_of(config) if args is not None]
    if not served or served[0].model.device == "cpu" or find_spec("flashinfer") is None:
        return None
    capability, arguments = os.environ.get(ARCHITECTURES) or _capability(), arguments_for(served[0])
    if capability is None or arguments is None:
        return None
    return [*COMMAND, *arguments], {ARCHITECTURES: capability}


def arguments_for(args: AppArgs) -> list[str] | None:
    """Returns those of the command for the model of an application; None where FlashInfer has no part in it."""
    model = args.model  # for other dtypes than halves another library computes attention
    if model.dtype not in ("auto", *HALVES) or args.engine.numerics == "invariant":
        return None
    try:
        folder = find_folder(model)
    except ModelNotFound:  # which the check of the model reports
        return None
    if not (folder / "config.json").is_file():
        return None
    return ["--model", str(folder), *(() if model.dtype == "auto" else ("--dtypes", model.dtype))]


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
