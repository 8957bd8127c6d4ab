"""What the scheduler keeps in Redis: the pools' blocks, the token journal and the request records.

`types`, `errors` and `hashing` are pure; only `connection` imports the Redis client, to connect;
from there on `wire` speaks with Redis.
"""
