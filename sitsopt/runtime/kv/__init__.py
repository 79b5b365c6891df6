"""Quantized caches of keys and values that transformers models take as their own."""
