"""Tensor parallelism of models: each rank loads a shard, and sums and gathers make one model of
all shards.

A shard is a model of the same class with fewer heads, a narrower MLP and a part of the vocabulary,
so that its parts are fused, packed and rounded as those of any other model.
"""
