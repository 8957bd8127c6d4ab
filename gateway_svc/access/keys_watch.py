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
from quire.service.files import file_version

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
            try:
                await loop.run_in_executor(None, self.poll)
            except Exception as error:
                # Such as memory or a thread that the system refuses. Only the type of an error in
                # the parser is logged: its message may have a part of the file.
                self._fail(f"the file was not read: {type(error).__name__}")

    def poll(self) -> None:
        """Read the file again if it has changed, or could not be read, as while the process has no
        file left to open. An error is logged once."""
        # Before the file is read: a change during the reading is seen by the next poll.
        version = file_version(self._path)
        if version == self._version and not self._failure:
            return
        try:
            tenants = read_keys_file(self._path)
        except KeysFileUnreadableError as error:
            self._fail(str(error))
            return
        except KeysFileError as error:
            self._version, self._failure = version, ""
            log.error("keys file not reloaded", reason=str(error))
            return
        self._version, self._failure = version, ""
        self.authentication.replace(tenants)
        log.info("keys file reloaded", keys=len(tenants))
        if not tenants:
            log.warning("the keys file has no keys", effect="every call is refused")

    def _fail(self, reason: str) -> None:
        """Let the next poll read the file again, even if it does not change."""
        if reason != self._failure:
            self._failure = reason
            log.error("keys file not reloaded", reason=reason)
