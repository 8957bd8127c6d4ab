"""Reads the keys file again whenever it changes."""

import asyncio
from pathlib import Path

import structlog

from gateway_svc.access.authentication import Authentication
from gateway_svc.access.keys_file import (
    KeysFileError,
    KeysFileUnreadableError,
    read_keys_file,
)
from quire.service.file_version import file_version

log = structlog.get_logger()

POLL_INTERVAL_S = 0.5


class KeysWatch:
    """Keeps authentication equal to its file. An invalid file keeps the former keys."""

    def __init__(self, path: Path) -> None:
        """Read the file. KeysFileError if it is not valid."""
        self._path = path
        self._version = file_version(path)
        # Why the file was not read the last time; empty if it was.
        self._failure = ""
        self.authentication = Authentication(read_keys_file(path))

    async def run(self) -> None:
        """Poll until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(POLL_INTERVAL_S)
            await loop.run_in_executor(None, self.poll)

    def poll(self) -> None:
        """Read the file again if it has changed, or could not be read, as while the process has no
        file left to open. An error is logged once."""
        version = file_version(self._path)
        if version == self._version and not self._failure:
            return
        # Before the file is read: a change during the reading is seen by the next poll.
        self._version = version
        last_failure, self._failure = self._failure, ""
        try:
            tenants = read_keys_file(self._path)
        except KeysFileError as error:
            if isinstance(error, KeysFileUnreadableError):
                self._failure = str(error)
            if str(error) != last_failure:
                log.error("keys file not reloaded", reason=str(error))
            return
        self.authentication.replace(tenants)
        log.info("keys file reloaded", keys=len(tenants))
        if not tenants:
            log.warning("the keys file has no keys", effect="every call is refused")
