"""Lanes: the scheduler's side of each worker, its sequences and its `Execute` stream."""
