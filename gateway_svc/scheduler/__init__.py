"""The connections to the leaders of all shards: leader discovery, one stream per shard for its
requests, and the choice of a request's shard.

Called by `generation`, `rpc`, `http`, `metrics` and `server`. Imports no other package of the
gateway.
"""
