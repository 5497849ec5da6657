"""Environments as plain classes, one small file each."""
