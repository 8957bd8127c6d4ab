"""The worker's gRPC service: its process, the servicer, and the stream that checks plans in order.

Called by `worker_svc.__main__`; `process` also by `loading`, `ranks` and `cache`. Runs any
`StepRunner`.
"""
