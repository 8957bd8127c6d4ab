"""The small operations between a model's products in Triton, each in one launch.

The tiles of a launch depend on the length of a row alone, so a row's result does not depend on the
rows beside it. Products are rounded before they are added (`enable_fp_fusion=False`), as in torch's
operations and in the references.
"""
