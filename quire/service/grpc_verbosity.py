"""Limits what gRPC's core writes to stderr to errors; imported before grpc.

The core reads the variable when grpc is imported. Its default also has lines of the level INFO, for
example for each failed TLS handshake, such as those of port scanners.
"""

import os

os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
