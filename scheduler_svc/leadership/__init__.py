"""Leader election: standbys compete for the lease in Redis; the leader renews it.

Called by `scheduler_svc.shard` and `scheduler_svc.server`. `gateway` and the lanes wait for the
lease before they send.
"""
