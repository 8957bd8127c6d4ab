"""Runs files of requests in OpenAI's batch format against an HTTP API. Called by `quire.cli.batch`.

The bodies are sent to a server as they are, because only a gateway validates and formats them.
"""
