"""Quire beside other engines: the same work, on the same machine, in one go.

models        the models, of random weights
workload      the work
batcher       continuous batching in 100 lines, for what has no scheduler of its own
host          a child process that holds one system and runs the work when it is told to
quire_stack, runner_alone, transformers_generate, vllm_offline, matrix_products
              what such processes run
vllm_server   vLLM's OpenAI server, for latencies
throughput, latency, worker
              the parts: measurements, tables, targets
"""
