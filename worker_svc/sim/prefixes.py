"""Which prefix a token position stands for, as one word."""

import numpy as np

from worker_svc.inputs import Ints
from worker_svc.sim.tokens import Words, mix
from worker_svc.tables import Tables


class PrefixHashes:
    """Beside each entry of the token table a hash of its sequence up to and including it.

    The hash is a sum over the tokens, each mixed with its position: prefixes of a whole sequence
    are one cumulative sum, and a sampled token adds to its predecessor's hash.
    """

    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        self.table = np.zeros(tables.token_table.shape, np.uint64)

    def admit(self, row: int, token_ids: Ints) -> None:
        positions = np.arange(len(token_ids))
        self.table[row, : len(token_ids)] = np.cumsum(_terms(token_ids, positions))

    def extend(self, rows: Ints, token_ids: Ints) -> None:
        """To be called before the tokens are written into the token table."""
        ends = self._tables.num_tokens[rows]
        self.table[rows, ends] = self.table[rows, ends - 1] + _terms(token_ids, ends)


def _terms(token_ids: Ints, positions: Ints) -> Words:
    keys = (positions.astype(np.uint64) << np.uint64(32)) + token_ids.astype(np.uint64)
    # Of the word 0 nothing is left by the mixing; slots nobody wrote are 0.
    return mix(keys + np.uint64(1))
