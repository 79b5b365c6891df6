"""Rounding weights so that a model's output changes least: numbers, scales, what gets how many bits, kept on disk."""
