"""Reads the keys file again whenever it changes."""

import asyncio
from pathlib import Path

import structlog

from gateway_svc.access.authentication import Authentication
from gateway_svc.access.keys_file import KeysFileError, read_keys_file
from quire.service.file_version import file_version

log = structlog.get_logger()

POLL_INTERVAL_S = 0.5


class KeysWatch:
    """Keeps authentication equal to its file. An invalid file keeps the former keys."""

    def __init__(self, path: Path) -> None:
        """Read the file. KeysFileError if it is not valid."""
        self._path = path
        self._version = file_version(path)
        self.authentication = Authentication(read_keys_file(path))

    async def run(self) -> None:
        """Poll until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(POLL_INTERVAL_S)
            await loop.run_in_executor(None, self.poll)

    def poll(self) -> None:
        """Read the file again if it has changed. An error is logged once per change."""
        version = file_version(self._path)
        if version == self._version:
            return
        # Before the file is read: a change during the reading is seen by the next poll.
        self._version = version
        try:
            tenants = read_keys_file(self._path)
        except KeysFileError as error:
            log.error("keys file not reloaded", reason=str(error))
            return
        self.authentication.replace(tenants)
        log.info("keys file reloaded", keys=len(tenants))
