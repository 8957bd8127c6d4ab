"""The formats of output: choice updates as OpenAI's JSON. Pure.

Called by `output`, which writes them.
"""
