"""What can go wrong between the scheduler and Redis."""


class StoreError(Exception):
    """Any failure of a store call."""


class StoreUnavailable(StoreError):
    """Redis cannot be reached, or refuses the credentials. The call may have been carried out."""


class StaleEpoch(StoreError):
    """Another leader has taken over: nothing was changed, and nothing may be sent any more."""


class LeadLost(StoreError):
    """No leadership is held, or Redis does not know it any more: it has lost writes.

    Nothing was changed. A leader takes the lead anew.
    """


class WrongStep(StoreError):
    """A commit for a step that is neither the next nor the stored one. Nothing was changed."""


class PoolFault(StoreError):
    """A call that contradicts the pool's state, or a pool that contradicts itself.

    The call changed nothing; the lane is to be reopened.
    """


class RequestFault(StoreError):
    """Output that does not continue a live record. The call changed nothing."""
