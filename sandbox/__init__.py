"""Runs untrusted Python in isolated sessions, over HTTP. Imports no other package of the project."""
