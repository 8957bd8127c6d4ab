"""The public gRPC services: inference, models and tokenizer, as adapters to `generation`.

Called by `server`.
"""
