"""The gateway service: public API, validation, tokenization, streamed text. Loads no torch.

Its process is `python -m gateway_svc`, which containers and `quire.launcher` start. No other
package imports it.
"""

import quire.service.grpc_verbosity  # noqa: F401
