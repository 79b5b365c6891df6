"""The error for bad input that is not in a file: one clear sentence, and what to do."""

from __future__ import annotations


class InputError(ValueError):
    """The user asked for something that cannot be had; the command line exits 2."""
