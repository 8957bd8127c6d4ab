"""The gateway: text, tokens and limits. It knows no blocks, no workers, no tensors."""
