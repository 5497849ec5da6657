"""The expert for Countdown: tries everything. The demonstrations run its source in the sandbox."""

from __future__ import annotations


def search(items: list[tuple[float, str]], target: int) -> str | None:
    """An expression of all items (value, text) that equals `target`; None when there is none."""
    if len(items) == 1:
        return items[0][1] if abs(items[0][0] - target) < 1e-9 else None
    for i, (a, x) in enumerate(items):
        for j, (b, y) in enumerate(items):
            if i == j:
                continue
            results = [(a - b, f"({x} - {y})")]
            if i < j:
                results += [(a + b, f"({x} + {y})"), (a * b, f"({x} * {y})")]
            if b:
                results.append((a / b, f"({x} / {y})"))
            rest = [item for k, item in enumerate(items) if k not in (i, j)]
            for result in results:
                if found := search([result, *rest], target):
                    return found
    return None
