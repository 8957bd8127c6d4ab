"""Operations on the device, called by worker_svc: tensors in, tensors out.

Their vocabulary is slots, block tables and numbers, not requests, rows or messages.
"""
