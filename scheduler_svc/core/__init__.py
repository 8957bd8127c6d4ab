"""Requests, sequences and the scheduling policy: values in, values out.

Of gRPC it uses error codes and one message, of `store` the values of records and hash chains, of
`beams` the state of a search, of `tracing` the trace of a request, of `quire.service` errors and
histograms. Used by `engine`, `lane`, `gateway` and `operations`.
"""
