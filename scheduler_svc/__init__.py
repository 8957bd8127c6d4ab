"""The scheduler service: decides which sequences run, on which worker, with which blocks.

Its process is `python -m scheduler_svc`, which containers and `quire.launcher` start. No other
package imports it.
"""

import quire.service.grpc_verbosity  # noqa: F401
