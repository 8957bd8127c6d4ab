"""Leader election: standbys compete for the lease in Redis; the leader renews it.

Called by `scheduler_svc.server` and `scheduler_svc.term`. `gateway` and the lanes wait for the
lease before they send.
"""
