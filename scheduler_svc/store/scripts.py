"""The Lua scripts: one file each, whose header describes KEYS, ARGV and the reply."""

from dataclasses import dataclass
from functools import cached_property
from hashlib import sha1
from importlib.resources import files
from pathlib import PurePosixPath
from typing import Final

_USES: Final = "-- USES "


@dataclass(frozen=True)
class Script:
    """A file of the folder `lua`, or of a folder in it, by its name without the suffix."""

    name: str
    folder: str = ""

    @cached_property
    def header(self) -> str:
        """The comment at the top of the file."""
        lines = self._read(self._file).splitlines()
        end = next(i for i, line in enumerate(lines) if not line.startswith("--"))
        return "\n".join(lines[:end])

    @cached_property
    def body(self) -> str:
        """The source that Redis runs: the libraries named in the header, then the file."""
        used = [x.removeprefix(_USES) for x in self.header.splitlines() if x.startswith(_USES)]
        return "\n".join(self._read(name) for name in (*used, self._file))

    @cached_property
    def digest(self) -> str:
        return sha1(self.body.encode(), usedforsecurity=False).hexdigest()

    @property
    def _file(self) -> str:
        return str(PurePosixPath(self.folder, f"{self.name}.lua"))

    def _read(self, name: str) -> str:
        return files(__package__).joinpath("lua", name).read_text(encoding="utf-8")


MATCH_PREFIXES: Final = Script("match_prefixes")
COMMIT: Final = Script("commit")
OPEN_POOL: Final = Script("open_pool")
RECLAIM_POOL: Final = Script("reclaim_pool")
RESET_HASHES: Final = Script("reset_hashes")
BLOCK_MAP: Final = Script("block_map")
TRIM_JOURNAL: Final = Script("trim_journal")
DETACH_POOL: Final = Script("detach_pool")
DROP_POOL: Final = Script("drop_pool")
ACQUIRE_LEASE: Final = Script("acquire_lease", "leadership")
REACQUIRE_LEASE: Final = Script("reacquire_lease", "leadership")
RENEW_LEASE: Final = Script("renew_lease", "leadership")
RELEASE_LEASE: Final = Script("release_lease", "leadership")
RECORD_REQUESTS: Final = Script("record_requests")
REPLACE_RECORDS: Final = Script("replace_records")
LIST_LIVE_RECORDS: Final = Script("list_live_records")
APPEND_OUTPUT: Final = Script("append_output")
FINISH_RECORDS: Final = Script("finish_records")
DISCARD_RECORDS: Final = Script("discard_records")
WRITE_TENANTS: Final = Script("write_tenants")
WRITE_MODEL: Final = Script("write_model", "leadership")
HEARTBEAT: Final = Script("heartbeat", "cluster")
WRITE_MAP: Final = Script("write_map", "cluster")
CLAIM_IDS: Final = Script("claim_ids", "cluster")
TRIM_INBOX: Final = Script("trim_inbox", "cluster")
SCRIPTS: Final = (
    MATCH_PREFIXES, COMMIT, OPEN_POOL, RECLAIM_POOL, RESET_HASHES, BLOCK_MAP, TRIM_JOURNAL,
    DETACH_POOL, DROP_POOL, ACQUIRE_LEASE, REACQUIRE_LEASE, RENEW_LEASE, RELEASE_LEASE,
    RECORD_REQUESTS, REPLACE_RECORDS, LIST_LIVE_RECORDS, APPEND_OUTPUT, FINISH_RECORDS,
    DISCARD_RECORDS, WRITE_TENANTS, WRITE_MODEL, HEARTBEAT, WRITE_MAP, CLAIM_IDS, TRIM_INBOX,
)  # fmt: skip
