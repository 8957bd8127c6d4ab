"""The formats of output: choice updates as OpenAI's JSON. Pure.

Chosen by the routes, called by `output`, which writes them.
"""
