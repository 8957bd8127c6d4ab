"""Logits processors: changes of logits between the forward pass and the sampler, row by row."""
