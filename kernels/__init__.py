"""What runs on the device: tensors in, tensors out.

Knows slots, block tables and numbers. Knows no requests, no rows of a worker's tables, no messages.
"""
