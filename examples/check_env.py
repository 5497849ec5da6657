"""Check an environment before anyone trains on it: `python examples/check_env.py [module:Class]`."""

from __future__ import annotations

import sys

import agentrl


def main(target: str, limit: int = 8) -> bool:
    """Print each check: a gold answer must score 1.0, a wrong one 0.0, and so on."""
    return agentrl.check_env(
        target, limit=limit, on_check=lambda check: print(f"{check.level:<5}{check.name}: {check.detail}")
    ).ok


if __name__ == "__main__":
    sys.exit(0 if main(sys.argv[1] if sys.argv[1:] else "envs.modmath:ModMath") else 1)
