"""Packed values, which kernels convert in registers."""
