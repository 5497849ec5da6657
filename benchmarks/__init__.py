"""Measurements side by side with the alternatives; each commits its report beside it."""
