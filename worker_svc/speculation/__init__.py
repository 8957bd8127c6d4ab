"""Speculative decoding: draft tokens, how many of them a row gets, and what became of them.

A token is a function of the model, the tokens before it, the seed and its position. So a draft is
right or wrong, at any temperature: a step computes a row's last token with its drafts, samples at
each of them as always, and keeps what it sampled up to the first difference.
"""
