"""Reloads API keys from the configuration and its file without a restart."""

import asyncio
import logging
import os

from deployments.auth.authenticator import Authenticator
from deployments.auth.settings import AuthArgs
from deployments.periodic import PeriodicTask

log = logging.getLogger("assay.http")
Signature = tuple[int, int, int]


class KeyReloader(PeriodicTask):
    """Puts the keys of a configuration in force, and reads its file of keys again whenever the file has changed.

    Args:
        args: the section `auth`.
        access: gets the keys.
        ingresses: number of ingresses that share the limits.

    Raises:
        ValueError: the keys cannot be used.
    """

    def __init__(self, args: AuthArgs, access: Authenticator, ingresses: int) -> None:
        super().__init__()
        self._access = access
        self._ingresses = ingresses
        self.use(args)

    def use(self, args: AuthArgs) -> None:
        """Puts a configuration in force. Raises ValueError, and keeps the former one, if its keys cannot be used."""
        signature = _signature(args)
        self._access.use(args.settings(self._ingresses))
        self._args, self._seen = args, signature
        self.wake()

    @property
    def period_s(self) -> float:
        return self._args.reload_period_s

    async def look(self) -> None:
        """Reads the file again if it has changed. A file that cannot be used changes nothing and is logged once."""
        args = self._args
        signature = await asyncio.to_thread(_signature, args)
        if signature == self._seen:
            return
        try:
            settings = await asyncio.to_thread(args.settings, self._ingresses)
        except ValueError as error:
            log.error("The former keys stay in force. %s", error)
        else:
            if args is not self._args:  # `use` has changed the configuration meanwhile
                return
            self._access.use(settings)
            log.info("%d keys are in force.", len(settings.keys))
        self._seen = signature


def _signature(args: AuthArgs) -> Signature | None:
    """Returns a value that changes with the file, also where a link changes, as in a mounted secret. None: no file.

    The time of its last change counts permissions too, and no program sets it back as it may the time of writing.
    """
    if args.mode != "keys" or args.keys_file is None:
        return None
    try:
        found = os.stat(args.keys_file)
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_ctime_ns
