"""From settings to a runner that is ready for plans: device, model, draft model, cache, warm-up.

Called by `worker_svc.__main__`, and by followers in `ranks` to load their part.
"""
