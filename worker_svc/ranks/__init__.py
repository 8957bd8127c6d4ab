"""The ranks of a worker: processes that run one model together, each with a shard of it or some of
its layers.

Rank 0 is the worker that schedulers know: it has the tables, samples, and sends the inputs of each
forward pass to the others, which follow. Called by `loading`; `model` sums and gathers through
`group`.
"""
