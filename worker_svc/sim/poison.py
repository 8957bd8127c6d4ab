"""Requests that kill their worker, for tests of what becomes of the others."""

import os

from worker_svc.plans import Plan

# What a shell says of a process that SIGKILL ended. The signal itself would not do: the first
# process of a container cannot send it to itself.
_KILLED = 137


class Poison:
    """Ends the process at once when a row runs whose prompt holds a certain token."""

    def __init__(self, token_id: int) -> None:
        self._token_id = token_id
        self._rows: set[int] = set()

    def take(self, plan: Plan) -> None:
        """To be called for every plan, in order. Does not return if a poisoned row is scheduled."""
        self._rows.difference_update(plan.released_rows.tolist())
        for admission in plan.admissions:
            if self._token_id in admission.token_ids[: admission.num_prompt_tokens]:
                self._rows.add(admission.row)
        if not self._rows.isdisjoint(plan.rows.tolist()):
            os._exit(_KILLED)

    def clear(self) -> None:
        """All rows are gone."""
        self._rows.clear()
