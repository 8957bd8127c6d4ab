"""The bound on requests whose clients have disconnected."""

from types import SimpleNamespace

from scheduler_svc.gateway.orphans import Orphans


class Request:
    """The parts of a group that orphans read."""

    def __init__(self) -> None:
        self.num_live = 16
        self.is_abandoned = False
        self.record = SimpleNamespace(resume_window_s=60, deadline_ms=None)


async def test_the_oldest_abandoned_requests_are_ended_beyond_the_bound() -> None:
    ended: list[object] = []
    orphans = Orphans(30, ended.append)
    lost_with_gateway = [Request() for _ in range(10)]
    for request in lost_with_gateway:
        orphans.add(request, client_gone=False)
    abandoned = [Request() for _ in range(6)]
    for request in abandoned:
        orphans.add(request, client_gone=True)
    assert ended == abandoned[:2]
    assert [request.is_abandoned for request in abandoned] == [False] * 2 + [True] * 4
    orphans.close()
