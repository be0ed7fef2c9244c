"""KeysWatch: the keys that are in force now, from the configuration and its file, without a restart."""

import asyncio
import contextlib
import logging
import os

from deployments.auth.authenticator import Access
from deployments.auth.settings import AuthArgs

log = logging.getLogger("assay.http")
Signature = tuple[int, int, int]


class KeysWatch:
    """`use` puts arguments in force at once; where they name a file, it is read again whenever it has changed."""

    def __init__(self, args: AuthArgs, access: Access, ingresses: int) -> None:
        """Raises ValueError for keys that cannot be used."""
        self._access = access
        self._ingresses = ingresses
        self._task: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self.use(args)

    def use(self, args: AuthArgs) -> None:
        """Raises ValueError, and leaves what was in force. Blocks for as long as reading a small file takes."""
        signature = _signature(args)
        self._access.use(args.settings(self._ingresses))
        self._args, self._seen = args, signature
        self._changed.set()

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait((self._task,))

    async def _run(self) -> None:
        while True:
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._args.reload_s):
                    await self._changed.wait()
            try:
                await self.look()
            except Exception:  # the next look may go well, and without this task there would be none
                log.exception("Looking at the file of keys failed.")

    async def look(self) -> None:
        """Reads the file again if it has changed. One that cannot be used changes nothing, and is told of once."""
        args = self._args
        signature = await asyncio.to_thread(_signature, args)
        if signature == self._seen:
            return
        try:
            settings = await asyncio.to_thread(args.settings, self._ingresses)
        except ValueError as error:
            log.error("The former keys stay in force. %s", error)
        else:
            if args is not self._args:  # `use` was faster
                return
            self._access.use(settings)
            log.info("%d keys are in force.", len(settings.keys))
        self._seen = signature


def _signature(args: AuthArgs) -> Signature | None:
    """Changes with the file, also where a link is set to another one, as for a mounted secret. None: there is none."""
    if args.mode != "keys" or args.keys_file is None:
        return None
    try:
        found = os.stat(args.keys_file)
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns
