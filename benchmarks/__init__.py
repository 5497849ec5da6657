"""Measurements against the alternatives, each with its committed report."""
