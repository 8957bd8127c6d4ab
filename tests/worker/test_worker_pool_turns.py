"""Workers that size their caches on one GPU wait for each other."""

import asyncio
import sys
from pathlib import Path

from worker_svc.turns import one_at_a_time

_OTHER = """
import sys
from worker_svc.turns import one_at_a_time
with one_at_a_time(sys.argv[1]):
    print("its turn", flush=True)
"""


async def test_one_waits_until_the_other_has_left(tmp_path: Path) -> None:
    path = tmp_path / "any"
    path.touch()
    with one_at_a_time(str(path)):
        other = await asyncio.create_subprocess_exec(
            sys.executable, "-c", _OTHER, str(path), stdout=asyncio.subprocess.PIPE
        )
        assert other.stdout is not None
        # Its log line comes when it has found the file locked.
        assert b"waiting for another worker" in await other.stdout.readline()
    assert await other.stdout.readline() == b"its turn\n"
    assert await other.wait() == 0
