"""The text of each token id, special tokens included, from a model's tokenizer.json.

It shows what the recorded ids are, and never renders a conversation again. Independent of turns and templates.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer

REPLACEMENT = "\ufffd"


class Pieces:
    """Decodes single ids, each once. Without a tokenizer every text is None, and `problem` says why.

    Example:
        pieces = Pieces.of_model([Path("models/quickstart")])
        pieces.text(42), pieces.is_special(2)
    """

    def __init__(self, tokenizer: Tokenizer | None, problem: str = "") -> None:
        self.problem = problem
        self._tokenizer = tokenizer
        self._special: set[int] = set()
        if tokenizer is not None:
            self._special = {i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}
        self._texts: dict[int, str] = {}

    @classmethod
    def of_model(cls, folders: Iterable[Path]) -> Pieces:
        """The first of these folders that holds a tokenizer.json which can be read."""
        tried = []
        for folder in folders:
            path = folder / "tokenizer.json"
            tried.append(str(folder))
            if path.is_file():
                from tokenizers import Tokenizer

                try:
                    return cls(Tokenizer.from_file(str(path)))
                except Exception as error:  # the library raises Exception itself
                    return cls(None, f"token texts are not shown: {path} cannot be read ({error})")
        return cls(None, f"token texts are not shown: no tokenizer.json in {', '.join(tried) or 'the model'}")

    def text(self, token_id: int) -> str | None:
        """The text of one id; bytes that are no whole character are written as \\xNN."""
        if self._tokenizer is None:
            return None
        if token_id not in self._texts:
            text: str = self._tokenizer.decode([token_id], skip_special_tokens=False)
            if REPLACEMENT in text:
                text = _escaped(self._tokenizer.id_to_token(token_id) or "") or text
            self._texts[token_id] = text
        return self._texts[token_id]

    def is_special(self, token_id: int) -> bool:
        """Whether it is a special token, such as the end of a turn."""
        return token_id in self._special


def _escaped(piece: str) -> str:
    """The bytes of a byte-level piece as \\xNN; empty for a piece of another kind."""
    table = _byte_of_sign()
    if not all(sign in table for sign in piece):
        return ""
    return "".join(f"\\x{table[sign]:02x}" for sign in piece)


@cache
def _byte_of_sign() -> dict[str, int]:
    """How byte-level vocabularies write each byte (GPT-2's table): printable Latin-1 as itself, others from 256."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
