"""What the scheduler costs: real processes around simulated workers.

load        a gateway's end of the Connect stream
probe       the scheduler, with counters that its own metrics do not have
worker_host simulated workers, several in a process
stack       these and a Redis, started and stopped together
"""
