"""Pipeline parallelism of models: each rank loads a stage, some consecutive layers, and hidden
states go from stage to stage.

A stage is a model of the same class with fewer layers. Where it has no embedding or no head it has
stand-ins of a few tokens, so that its parts are probed, fused and packed as those of any other
model.
"""
