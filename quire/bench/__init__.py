"""A load generator, which measures latencies and throughput at the client.

Arrivals are open-loop: a slow server does not slow the load. Latencies count from the arrival of a
request, so that they include all waiting time. Called by `quire.cli.bench` and by `benchmarks/`.
"""
