"""Measures the scheduler with simulated workers, in real processes.

load         a load generator that speaks the gateway's side of the Connect streams
shard_stream its stream to the leader of one shard
placement    where a gateway would send a request
probe        the scheduler with additional counters
worker_host  simulated workers, several per process
stack        these processes and a Redis, started and stopped together
fleet        many workers and shards, led by several schedulers, without the counters
"""
