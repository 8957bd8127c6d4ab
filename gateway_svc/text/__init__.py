"""Text of the served model: tokenizer, chat template, detokenization and stop strings.

Called by `generation`, `rpc` and `server`. Imports no other package of the gateway.
"""
