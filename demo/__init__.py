"""The demo: a small language model, the scripts that make and measure it, and a tour of Quire."""
