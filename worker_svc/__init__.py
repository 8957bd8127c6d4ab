"""The worker: one model on one device, run step by step by the scheduler's plans.

Knows rows, tables, tensors, models and sampling. Knows no users, no queues, no policies.
"""
