"""Runs untrusted code. Imports none of the other packages."""
