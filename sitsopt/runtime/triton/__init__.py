"""Triton kernels at run time: compiled without a GPU, interpreted without a compiler, launched on a GPU."""
