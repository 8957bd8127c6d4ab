"""The client library: `Client` and `AsyncClient`, their requests, outputs, errors and retries.

`quire` exports its public names. The command, `bench`, `demo`, `replay` and the
launcher use the rest; services use none of it.
"""
