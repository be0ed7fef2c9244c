"""python -m deployments.standby.process SOCKET: imports what a replica needs, and becomes the worker it is sent."""

import ctypes
import importlib
import json
import os
import runpy
import select
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from deployments.garbage_collection import paused
from deployments.standby.launcher import TAKEN

# Most of what a replica imports. Ray itself must see the worker's environment when it is imported, and so must the CUDA
# driver when it starts.
MODULES: Final = (
    "deployments.replica.make_engine",
    "deployments.observability.replica_metrics",
    "deployments.link.server",
    "torch._inductor.compile_fx",
    "fastapi",  # by Serve
)
COUNTS_WITHOUT_DRIVER: Final = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}  # torch's modules count GPUs as they are imported
DRIVER: Final = "libcuda.so.1"
NOT_INITIALIZED: Final = 3  # CUDA_ERROR_NOT_INITIALIZED
STANDARD_FILES: Final = 3
PART: Final = 1 << 16  # bytes


def main(path: Path, modules: Sequence[str] = MODULES) -> None:
    """Waits at the socket `path` once it has imported the modules, and becomes the first worker that is sent."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        os.environ.update(COUNTS_WITHOUT_DRIVER)
        with paused():
            for module in modules:
                importlib.import_module(module)
        fit = is_fit()
        found = select.select([listener, sys.stdin], [], [])[0] if fit else []
        path.unlink()
        if listener not in found:  # `assay serve` has ended
            return
        connection, _ = listener.accept()
    become(connection)


def is_fit() -> bool:
    """Returns whether this process may still become a worker: Ray will say which GPU is its own."""
    return "ray" not in sys.modules and not driver_has_started()


def driver_has_started() -> bool:
    """Returns whether the CUDA driver has started in this process; false where there is none.

    From then on the driver ignores changes of CUDA_VISIBLE_DEVICES: every worker would compute on the first GPU. Torch
    starts it to count devices, which `torch.cuda.is_initialized` does not tell.
    """
    try:
        driver = ctypes.CDLL(DRIVER)
    except OSError:
        return False
    status: int = driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int()))
    return status != NOT_INITIALIZED


def become(connection: socket.socket) -> None:
    """Takes the launcher's files, environment and folder as this process's own, and runs its program."""
    message, files, _, _ = socket.recv_fds(connection, PART, STANDARD_FILES)
    parts = [message.removeprefix(TAKEN)]
    while part := connection.recv(PART):
        parts.append(part)
    program, environment, folder = _read(b"".join(parts))
    os.write(sys.stdout.fileno(), TAKEN)  # to the pool
    for own, given in enumerate(files):
        os.dup2(given, own)
        os.close(given)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.argv = program
    connection.sendall(TAKEN)
    runpy.run_path(program[0], run_name="__main__")
    connection.close()  # at the end alone: the launcher ends when this process does


def _read(sent: bytes) -> tuple[list[str], dict[str, str], str]:
    program, environment, folder = json.loads(sent)
    return program, environment, folder


if __name__ == "__main__":
    main(Path(sys.argv[1]))
