"""Schedulers that divide the shards among themselves: who runs, who leads which shard, which worker
belongs to which.

Created by `scheduler_svc.server`; terms read it.
"""
