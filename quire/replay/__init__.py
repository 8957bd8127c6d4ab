"""Offline replay of recorded plans: draws their steps or runs them again on a worker.

Called by the `quire` command. Needs a worker only: a simulated one, or one at an address.
"""
