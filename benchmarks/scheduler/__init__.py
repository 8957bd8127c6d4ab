"""Measures the scheduler with simulated workers, in real processes.

load        a load generator that speaks the gateway's side of the Connect stream
probe       the scheduler with additional counters
worker_host simulated workers, several per process
stack       these processes and a Redis, started and stopped together
"""
