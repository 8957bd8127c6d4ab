"""C++ kernels, built once per machine or image and called as `torch.ops.quire`.

Loaded by `kernels.dispatch` and by the worker. `python -m kernels.cpu.build` compiles them.
"""
