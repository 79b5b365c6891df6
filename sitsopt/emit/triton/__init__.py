"""Triton text for kernel descriptions. Plain text in, plain text out: no torch, no triton."""
