"""A load generator: requests that arrive by themselves, and what their clients see of them.

Arrivals are open-loop: a slow server does not slow the load. Latencies count from the moment at
which a request was due, so that nobody's waiting is left out.
"""
