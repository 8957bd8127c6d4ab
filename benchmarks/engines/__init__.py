"""Compares Quire with other engines: the same work, on the same machine, in one run.

models        the models, with random weights
workload      the work
batcher       a minimal continuous batching scheduler, for the runner alone
host          a child process that runs the work with one system on command
child         its end of the connection
quire_stack, runner_alone, transformers_generate, vllm_offline, matrix_products
              the systems that such processes run
http_servers  servers of other engines, for latencies
throughput, latency, worker
              the parts: measurements, tables, targets
types         the comparison in 16, 8 and 4 bits
"""
