"""Has the processes of a service keep the bytecode of what they import, where Python would not.

A start imports torch and the library of models in a dozen processes. Compiling their sources takes longer than all else
of an import, and is done again in each process where their folders are read-only, or where PYTHONDONTWRITEBYTECODE is
set, as images do to stay small, and the installer compiled nothing.
"""

import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Final

PREFIX: Final = "PYTHONPYCACHEPREFIX"
NOT_WRITTEN: Final = "PYTHONDONTWRITEBYTECODE"
LARGEST: Final = "torch"  # of what is imported, and installed as the others are


def keep(library: str = LARGEST) -> None:
    """Has this process and those that it starts keep bytecode in the user's cache folder, unless Python keeps it beside
    the sources of `library`, or the environment names a folder. Nothing happens without a folder to write to."""
    if PREFIX in os.environ or _is_kept(library):
        return
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "assay" / "bytecode"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # a user may have no home
        return
    os.environ[PREFIX] = sys.pycache_prefix = str(folder)
    os.environ.pop(NOT_WRITTEN, None)
    sys.dont_write_bytecode = False


def _is_kept(library: str) -> bool:
    spec = find_spec(library)
    if spec is None or spec.origin is None or spec.cached is None or Path(spec.cached).exists():
        return True
    return not sys.dont_write_bytecode and os.access(Path(spec.origin).parent, os.W_OK)
