"""The scheduler's state in Redis: lease, blocks of the pools, token journals and request records.

`store.Store` is the entry point; `types`, `errors` and `hashing` are pure and imported everywhere.
Only `links` uses the Redis client, to connect; `resp` then speaks the protocol.
"""
