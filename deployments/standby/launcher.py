"""Ray starts this in place of Python for a replica: FOLDER PROGRAM ARGUMENT...

It hands the program to the first process that waits in FOLDER, and ends when that process does. It runs by itself,
without the package and without Python's site, which would take longer than all that it does.
"""

import contextlib
import json
import os
import socket
import sys
from pathlib import Path

SUFFIX = ".sock"
TAKEN = b"\1"
TIMEOUT_S = 30.0  # for a process that still imports; Ray waits twice as long for a worker


def main(arguments: list[str]) -> None:
    """Ends with the process that took the program, or becomes an ordinary worker."""
    folder, *program = arguments
    for path in sorted(Path(folder).glob(f"*{SUFFIX}")):
        if handed_over(path, program):
            return
    os.execv(sys.executable, [sys.executable, *program])


def handed_over(path: Path, program: list[str]) -> bool:
    """Hands the program to the process behind a socket, and waits for its end; returns False where it does not take
    the program."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(TIMEOUT_S)
        try:
            connection.connect(str(path))
            socket.send_fds(connection, [TAKEN], [0, 1, 2])
            connection.sendall(json.dumps([program, dict(os.environ), os.getcwd()]).encode())
            connection.shutdown(socket.SHUT_WR)
            if connection.recv(1) != TAKEN:
                return False
        except OSError:  # another launcher came first, or the process has ended
            return False
        connection.settimeout(None)
        with contextlib.suppress(OSError):
            connection.recv(1)
    return True


if __name__ == "__main__":
    main(sys.argv[1:])
