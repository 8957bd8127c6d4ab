"""Runs Redis and the services as child processes on this machine.

- `child`: one process, with signals, restart and the end that it shares with this process.
- `spawner`: the thread that starts children, because they are killed when their thread ends.
- `processes`: a child with gRPC health checks, and groups that start and stop tier by tier.
- `supervisor`: the thread that restarts children that have ended.

Called by `LLM`, by the commands `serve`, `demo` and `replay`, and by tests and benchmarks.
"""
