"""Errors of store calls."""


class StoreError(Exception):
    """Any failure of a store call."""


class StoreUnavailable(StoreError):
    """Redis cannot be reached or cannot serve. The call may have been executed."""


class NoReply(StoreUnavailable):
    """Redis has sent no reply. Unlike one that it has refused, the call may still be executed."""


class StaleEpoch(StoreError):
    """Another scheduler has acquired the lease. Nothing was changed; no output may be sent."""


class LeadershipLost(StoreError):
    """No leadership is held, or Redis lost its entry with other writes.

    Nothing was changed. A leader reacquires the lease.
    """


class WrongStep(StoreError):
    """The commit's step is neither the next nor the stored one. Nothing was changed."""


class PoolFault(StoreError):
    """A call contradicts the pool's state, or the pool contradicts itself.

    Nothing was changed; the lane must be reopened.
    """


class RecordMismatch(StoreError):
    """The output does not continue a live record. Nothing was changed."""
