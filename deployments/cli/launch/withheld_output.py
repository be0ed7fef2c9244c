"""Withholds what this process prints, from any thread: a start that is refused says why, and nothing else."""

import os
import shutil
import sys
import tempfile
from types import TracebackType
from typing import IO, Any, Final

STANDARD: Final = (1, 2)  # output and errors


class WithheldOutput:
    """Withholds output in a block until `release`. At the end of a block that was not released, the output is lost if
    an exception of kind `loses` ends it, and printed otherwise."""

    def __init__(self, loses: type[BaseException]) -> None:
        self._loses = loses
        self._own = dict[int, int]()
        self._held = dict[int, IO[Any]]()

    def __enter__(self) -> "WithheldOutput":
        _flush()
        for file in STANDARD:
            self._own[file], self._held[file] = os.dup(file), tempfile.TemporaryFile()
            os.dup2(self._held[file].fileno(), file)
        return self

    @property
    def withholds(self) -> bool:
        return bool(self._own)

    def release(self, *, prints: bool = True) -> None:
        """Prints what was withheld, and withholds no more."""
        _flush()
        for file, own in self._own.items():
            os.dup2(own, file)
            os.close(own)
            with self._held[file] as held, os.fdopen(file, "wb", closefd=False) as out:
                held.seek(0)
                if prints:
                    shutil.copyfileobj(held, out)
        self._own.clear()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release(prints=not (kind is not None and issubclass(kind, self._loses)))


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
