"""The goals of a report, stated before its numbers."""

from __future__ import annotations

from collections.abc import Sequence

MIN_SHARE_OF_BARE = 0.95
MAX_ADDED_MS = 2.0
MAX_GAP_OVER_FLOOR = 10.0
MAX_FIXED_GAP_S = 0.1
MAX_PARITY = 1e-4

BY_SECTION = {
    "throughput": (
        f"our client reaches at least {MIN_SHARE_OF_BARE:.0%} of the bare generator's tokens/s at 1, 16, 64 and 256 "
        f"sessions, and adds less than {MAX_ADDED_MS:g} ms to a call at the median"
    ),
    "prefix": (
        "a second turn computes exactly the tokens that lie beyond the whole blocks of the first, and all of them "
        "under another version"
    ),
    "gap": (
        f"generation stands still for less than {MAX_FIXED_GAP_S:g} s plus {MAX_GAP_OVER_FLOOR:g} times what one copy "
        "of the bytes takes"
    ),
    "parity": (
        f"float32 logprobs differ from transformers' by less than {MAX_PARITY:g} at temperature 1; for bfloat16 there "
        "is no goal, it is measured"
    ),
    "head": "with float32 logits on both sides, engine and learner are closer than with bfloat16 logits on both",
    "rho": "without lag, float32 logits on both sides leave an ESS ratio at least as large as bfloat16 ones",
    "kv": (
        f"with `recompute` the tokens after an update differ from fresh KV entries by less than {MAX_PARITY:g}; with "
        "`stale` by less than the two policies differ themselves"
    ),
}


def head(sections: Sequence[str]) -> str:
    """The goals, as Markdown."""
    return "\nGoals:\n\n" + "".join(f"- {name}: {BY_SECTION[name]}\n" for name in sections)


def verdict(misses: Sequence[str]) -> str:
    """One paragraph after a section's numbers."""
    return f"\n**Goal missed:** {'; '.join(misses)}.\n" if misses else "\n**Goal met.**\n"
