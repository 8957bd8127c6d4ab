"""Measures what speculative decoding saves, and what it costs where it saves nothing."""
