"""Renders records as text, JSON and HTML. Never analyses again: what is not in the record is not told."""
