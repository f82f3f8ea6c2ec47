"""Kernels without silent fallback: each op's implementations, what they need, which one a device gets."""
