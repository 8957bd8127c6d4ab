"""The Lua scripts: one file each, declared here with the names that its header gives."""

from dataclasses import dataclass
from functools import cached_property
from hashlib import sha1
from importlib.resources import files
from typing import Final

_BLOCKS: Final = ("state", "free", "references", "hashes", "index")
_USES: Final = "-- USES "


@dataclass(frozen=True)
class Script:
    """A script's name and what it is called with. A last name in `...` repeats."""

    name: str
    keys: tuple[str, ...]
    args: tuple[str, ...]

    @cached_property
    def header(self) -> str:
        """The comment that the file opens with."""
        lines = self._read(f"{self.name}.lua").splitlines()
        end = next(i for i, line in enumerate(lines) if not line.startswith("--"))
        return "\n".join(lines[:end])

    @cached_property
    def body(self) -> str:
        """What Redis runs: the libraries that the header names, then the file."""
        used = [x.removeprefix(_USES) for x in self.header.splitlines() if x.startswith(_USES)]
        return "\n".join(self._read(name) for name in (*used, f"{self.name}.lua"))

    @cached_property
    def digest(self) -> str:
        return sha1(self.body.encode(), usedforsecurity=False).hexdigest()

    def _read(self, name: str) -> str:
        return files(__package__).joinpath(name).read_text(encoding="utf-8")


MATCH: Final = Script("match", _BLOCKS, ("query_lengths", "query_hashes"))
COMMIT: Final = Script(
    "commit",
    (*_BLOCKS, "published", "journal"),
    (
        "epoch",
        "holder",
        "step",
        "withdrawn_blocks",
        "published_blocks",
        "published_hashes",
        "run_sequences",
        "run_first_indices",
        "run_next_indices",
        "run_token_ids",
        "run_logprobs",
        "forgotten_sequences",
        "shared_blocks",
        "returned_blocks",
        "taken_references",
        "joined_sequences",
        "joined_next_indices",
        "admitted_sequences",
        "admitted_next_indices",
        "admitted_num_hits",
        "admitted_hit_hashes",
        "admitted_num_new_blocks",
        "admitted_num_fills",
        "admitted_fill_hashes",
    ),
)
OPEN: Final = Script(
    "open",
    (*_BLOCKS, "published"),
    ("epoch", "holder", "last_finished_step", "known_step", "num_blocks"),
)
RECLAIM: Final = Script("reclaim", _BLOCKS, ("epoch", "holder", "num_blocks"))
RESET: Final = Script("reset", ("state", "hashes", "index"), ("epoch", "holder"))
BLOCK_MAP: Final = Script("block_map", ("state", "references", "hashes"), ())
TRIM: Final = Script("trim", ("state", "journal"), ("epoch", "holder", "first_step"))
DROP: Final = Script("drop", ("state", "rest..."), ("epoch", "holder"))
TAKE_LEAD: Final = Script("take_lead", ("leadership",), ("holder", "address", "lease_ms"))
RETAKE_LEAD: Final = Script(
    "retake_lead", ("leadership",), ("epoch", "holder", "new_holder", "address")
)
RENEW_LEAD: Final = Script("renew_lead", ("leadership",), ("epoch", "holder"))
RELEASE_LEAD: Final = Script("release_lead", ("leadership",), ("epoch", "holder"))
RECORD: Final = Script("record", ("leadership", "records..."), ("epoch", "holder", "requests..."))
REPLACE: Final = Script("replace", ("leadership", "records..."), ("epoch", "holder", "requests..."))
LIVE: Final = Script("live", ("records...",), ())
FOLD: Final = Script("fold", ("leadership", "records..."), ("epoch", "holder", "runs..."))
FINISH: Final = Script(
    "finish",
    ("leadership", "ended", "records..."),
    ("epoch", "holder", "ttl_s", "max_bytes", "endings..."),
)
DISCARD: Final = Script(
    "discard", ("leadership", "records..."), ("epoch", "holder", "sequences...")
)
SCRIPTS: Final = (
    MATCH, COMMIT, OPEN, RECLAIM, RESET, BLOCK_MAP, TRIM, DROP, TAKE_LEAD, RETAKE_LEAD,
    RENEW_LEAD, RELEASE_LEAD, RECORD, REPLACE, LIVE, FOLD, FINISH, DISCARD,
)  # fmt: skip
