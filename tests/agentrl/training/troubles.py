"""docs/troubleshooting.md as tests see it: its headings are messages, in which `...` stands for what varies."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

PAGE = Path(__file__).parents[3] / "docs" / "troubleshooting.md"


def headings() -> list[str]:
    """Messages that the page explains, as they stand there."""
    return re.findall(r"^### `(.+)`$", PAGE.read_text(), flags=re.MULTILINE)


def fragments(heading: str) -> list[str]:
    """What of it does not vary."""
    return [part.strip() for part in heading.split("...") if part.strip()]


@dataclass(frozen=True)
class Trouble:
    """One heading of the page, which a test promises to provoke: test_troubleshooting.py looks for these."""

    heading: str

    def is_in(self, message: object) -> bool:
        """Whether the message is the one that the page explains; line ends count as spaces."""
        pattern = ".*?".join(re.escape(part) for part in fragments(self.heading))
        return re.search(pattern, " ".join(str(message).split())) is not None
