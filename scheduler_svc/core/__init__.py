"""Requests, sequences and the scheduling policy: values in, values out.

Of gRPC it uses error codes and one message, of `store` the values of records and hash chains.
Called by every other package but `store` and `leadership`.
"""
