"""Triton kernels; leaves that import nothing of ours."""
