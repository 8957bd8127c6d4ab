"""Live requests of the leading scheduler: queue, dispatch to lanes, records, discovery of workers.

Created by `scheduler_svc.term`, called by `gateway`; `operations` reads it.
"""
