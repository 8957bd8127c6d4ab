"""Groups without sequences, for tests of single parts."""

from array import array

from scheduler_svc.core.request import Params
from scheduler_svc.core.sequence import Group, NullSubscriber
from scheduler_svc.store.requests import RequestKey, RequestRecord


def bare_group(
    request_id: str, params: Params, tokens_per_frame: int = 1, principal: str = ""
) -> Group:
    key = RequestKey(principal, request_id)
    record = RequestRecord(key, b"", array("I"), b"", sequence_id=1)
    return Group(record, params, NullSubscriber(), tokens_per_frame=tokens_per_frame)
