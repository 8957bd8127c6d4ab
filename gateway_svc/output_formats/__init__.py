"""Formats of a model's output: text is split into reasoning, content and calls of tools.

Called by `generation`; `text` chooses those of a model. Everything here is pure: text in, pieces
out. A format reads text that arrives in any parts, and its pieces depend only on the text so far.
"""
