"""Compiles what the models of a configuration need before they are served: `assay warm CONFIG`."""

import argparse
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deployments.cli.launch import bytecode

if TYPE_CHECKING:
    from deployments.config.app_args import AppArgs

WARM, FAILED, WRONG = 0, 1, 2
ABOUT = """On the machine that will serve it does what a replica does before its first request: it loads each model,
checks it and warms it up. Where a model is for a GPU and there is none, as in the build of an image, it compiles what
needs no GPU, for the architectures that FLASHINFER_CUDA_ARCH_LIST names ("8.0 9.0a"). Compiled code is kept in
TRITON_CACHE_DIR, TORCHINDUCTOR_CACHE_DIR and FLASHINFER_WORKSPACE_BASE. exit status: 0 all is compiled; 1 a model is
not served, or something was not compiled; 2 the configuration is wrong, or names a GPU where there is none and no
architecture."""


def add(commands: Any) -> None:
    """Declares the command."""
    parser = commands.add_parser(
        "warm", help="compile what the models of a configuration need, for a fast start", epilog=ABOUT
    )
    parser.set_defaults(run=run)
    parser.add_argument("config", type=Path, help="a Serve config file, or a RayService manifest")


def run(given: argparse.Namespace) -> int:
    bytecode.keep()
    from deployments.cli.check import document, model  # importing torch takes seconds
    from deployments.cli.check.arguments import IMPORT_PATH, arguments_of

    try:
        read = document.read(given.config)
    except document.Unreadable as error:
        print(f"assay warm: {error}", file=sys.stderr)
        return WRONG
    served, findings = [], list(read.findings)
    for where, args, found in arguments_of(read.config):
        findings += found
        if args is not None:
            served.append(args)
            findings += model.check(args, where)[1]
    if errors := [one for one in findings if one.level == "error"]:
        print("\n".join(map(str, errors)), file=sys.stderr)
        return WRONG
    if not served:
        print(f"assay warm: {given.config} must have an application of {IMPORT_PATH}. Given: none.", file=sys.stderr)
        return WRONG
    if any(one.model.device == "cuda" and _lacks_gpu(one) and not _architectures() for one in served):
        message = "must name architectures, as 8.0 9.0a, where `model.device` is cuda and there is no GPU. Given: none."
        print(f"assay warm: FLASHINFER_CUDA_ARCH_LIST {message}", file=sys.stderr)
        return WRONG
    done = [_warm(one) for one in served]  # each, whatever becomes of the others
    return WARM if all(done) else FAILED


def _lacks_gpu(args: "AppArgs") -> bool:
    import torch

    return args.model.device != "cpu" and not torch.cuda.is_available()


def _architectures() -> list[str]:
    from engine.config import ARCHITECTURES

    return os.environ.get(ARCHITECTURES, "").split()


def _warm(args: "AppArgs") -> bool:
    """Returns whether all went well. Each start-up has a process of its own, which gives its GPU back."""
    if _lacks_gpu(args) and _architectures():
        from deployments.cli.launch.early_build import commands_of
        from engine.warmup.background_compile import RUN

        commands = commands_of(args, _architectures())
        statuses = [subprocess.run([*RUN, *command]).returncode for command in commands]
        return not any(statuses)
    process = multiprocessing.get_context("spawn").Process(target=_start_up, args=(args,))
    process.start()
    process.join()
    return process.exitcode == 0


def _start_up(args: "AppArgs") -> None:
    from deployments.replica.make_engine import make_engine

    def progress(stage: str, seconds: float) -> None:
        print(f"{args.model.name}: {stage} took {seconds:.2f} s", flush=True)

    try:
        make_engine(args, progress, complete=True)
    except Exception as error:  # of the library of models, too
        print(f"assay warm: {args.model.name} is not served: {error}", file=sys.stderr)
        sys.exit(FAILED)
