"""The environments that come with agentrl, as plain classes, one small file each.

May import: `agentrl`, `sandbox.client`. Start reading in `modmath.py`, which the quickstart trains. The modules that
register ids are entry points in pyproject.toml, so that `agentrl` does not import this package.
"""
