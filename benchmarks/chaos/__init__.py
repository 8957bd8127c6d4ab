"""Chaos tests: inject faults at random moments into a stack under constant load.

mix           the requests, drawn from a seed
comparison    one stream compared with the output of the same request without faults
streams       the clients
stack         the processes, restarted by a supervisor
redis_servers a Redis server or a Redis Cluster of the stack
faults        the faults
steady        waits until the stack has recovered
gaps          pauses between the messages of a stream
leftovers     checks after a run: no request, sequence or block is left
experiment    one run, from the start of the stack to its findings
joined        several runs as one
tables        findings as tables
"""
