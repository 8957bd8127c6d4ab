"""The worker: one model on one device or several ranks, run step by step by the scheduler's plans.

Contains rows, tables, tensors, models and sampling. Requests, queues and policies belong to the
scheduler. Its process is `python -m worker_svc`, which containers and `quire.launcher` start.
"""

import quire.service.grpc_verbosity  # noqa: F401
