"""Text <-> token ids, with added tokens only where the caller asks for them. Independent of templates and dialogues.

Two tokenizers share one vocabulary: the model's, and the same without its added tokens. The second one encodes a text
such as `<|im_end|>` as plain characters.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

MAX_TOKEN_CHARS = 128
"""Longer tokens are rare: before a text is encoded, it is cut to this many characters per wanted token."""

MAX_CACHED_CHARS = 32
"""Texts up to this length are cached: the template's own pieces recur in every turn."""
MAX_CACHED_TEXTS = 4096


class Codec:
    """Encodes and decodes for one vocabulary.

        codec = Codec(tokenizers.Tokenizer.from_file("tokenizer.json"))
        codec.decode(codec.encode("<|im_end|>"))  # "<|im_end|>", of plain characters

    Args:
        backend: a `tokenizers.Tokenizer`.
    """

    def __init__(self, backend: Any) -> None:
        from tokenizers import Tokenizer

        self._original = backend
        added = backend.get_added_tokens_decoder()
        self.added_ids: dict[str, int] = {token.content: i for i, token in added.items()}
        state = _without_first_space(json.loads(backend.to_str()))
        self._backend = Tokenizer.from_str(json.dumps(state))
        self._literal = Tokenizer.from_str(json.dumps(state | {"added_tokens": []}))
        for tokenizer in (self._backend, self._literal):
            tokenizer.no_truncation()
            tokenizer.no_padding()
        self._short: dict[str, tuple[int, ...]] = {}
        self._glue_tokens = _any_of(self.added_ids)
        self._assistant_tokens = _any_of([token.content for token in added.values() if not token.special])

    def encode(self, text: str) -> list[int]:
        """Ids of a content; it never becomes an added token, whatever it contains."""
        if len(text) > MAX_CACHED_CHARS:
            return list(self._literal.encode(text, add_special_tokens=False).ids)
        if text not in self._short:
            if len(self._short) >= MAX_CACHED_TEXTS:
                self._short.clear()
            self._short[text] = tuple(self._literal.encode(text, add_special_tokens=False).ids)
        return list(self._short[text])

    def encode_whole(self, text: str) -> list[int]:
        """Ids of a whole dialogue by the model's own tokenizer, added tokens included."""
        ids: list[int] = self._original.encode(text, add_special_tokens=False).ids
        return ids

    def encode_parts(self, parts: Sequence[str | int]) -> list[int]:
        """Ids are kept; neighbouring texts are encoded as one run, as the model saw them in pre-training."""
        ids: list[int] = []
        run: list[str] = []
        for part in (*parts, None):
            if isinstance(part, str):
                run.append(part)
                continue
            if run:
                ids.extend(self.encode("".join(run)))
                run.clear()
            if part is not None:
                ids.append(part)
        return ids

    def glue(self, text: str) -> list[str | int]:
        """The template's own text, split into added-token ids and the text between them."""
        return self._split(text, self._glue_tokens)

    def assistant_parts(self, text: str) -> list[str | int]:
        """A model's own text: markers such as `<tool_call>` become tokens; special tokens that end a turn do not."""
        return self._split(text, self._assistant_tokens)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of any ids, special tokens spelled out."""
        text: str = self._backend.decode(list(token_ids), skip_special_tokens=False)
        return text

    def decode_marked(self, token_ids: Sequence[int], marker: str) -> tuple[str, list[int] | None]:
        """The text, and the positions where `marker` was one token; None where the vocabulary has no such token."""
        marker_id = self.added_ids.get(marker)
        text = self.decode(token_ids)
        if marker_id is None or text.count(marker) == token_ids.count(marker_id):
            return text, None if marker_id is None else [m.start() for m in re.finditer(re.escape(marker), text)]
        text, places, start = "", [], 0
        for position, token_id in enumerate(token_ids):
            if token_id == marker_id:
                text += self.decode(token_ids[start:position])
                places.append(len(text))
                text += marker
                start = position + 1
        return text + self.decode(token_ids[start:]), places

    def truncate(self, text: str, max_tokens: int, *, keep: str = "both") -> str:
        """At most `max_tokens` tokens of `text`, including a note that replaces what was cut.

        Args:
            keep: `head`, `tail`, or `both` (the middle is cut).
        """
        if len(text) < max_tokens and len(text.encode()) < max_tokens:
            return text  # a token holds at least one byte
        text = cut_chars(text, 2 * max(max_tokens, 1) * MAX_TOKEN_CHARS, keep=keep, note="")
        encoding = self._literal.encode(text, add_special_tokens=False)
        num_tokens = len(encoding.ids)
        if num_tokens <= max_tokens:
            return text
        note = f"\n[... {num_tokens - max_tokens}+ tokens cut ...]\n"
        for num_kept in range(max_tokens - self.count(note), 1, -1):
            num_tail = {"both": num_kept // 2, "head": 0, "tail": num_kept}[keep]
            shorter = _ends(text, encoding.offsets, num_kept - num_tail, num_tail, note)
            if self.count(shorter) <= max_tokens:
                return shorter
        for num_kept in range(max_tokens, 0, -1):
            shorter = text[: encoding.offsets[num_kept - 1][1]]
            if self.count(shorter) <= max_tokens:
                return shorter
        return ""

    def count(self, text: str) -> int:
        """Tokens of `text` as content."""
        return len(self.encode(text))

    def _split(self, text: str, tokens: re.Pattern[str]) -> list[str | int]:
        parts = tokens.split(text)
        return [self.added_ids[part] if i % 2 else part for i, part in enumerate(parts) if part]


def cut_chars(text: str, max_chars: int, *, keep: str = "both", note: str = "\n[... cut ...]\n") -> str:
    """At most `max_chars` characters of `text`, plus a note where some were cut.

    >>> cut_chars("abcdefgh", 4, note="..")
    'ab..gh'
    """
    if len(text) <= max_chars:
        return text
    num_tail = {"both": max_chars // 2, "head": 0, "tail": max_chars}[keep]
    return text[: max_chars - num_tail] + note + text[len(text) - num_tail :]


def _ends(text: str, offsets: Sequence[tuple[int, int]], num_head: int, num_tail: int, note: str) -> str:
    """`num_head` and `num_tail` tokens of the ends, with the note between them."""
    head = text[: offsets[num_head - 1][1]] if num_head else ""
    return head + note + (text[offsets[-num_tail][0] :] if num_tail else "")


def _any_of(tokens: Iterable[str]) -> re.Pattern[str]:
    """A pattern with one group that matches any of `tokens`, longest first; it never matches without tokens."""
    ordered = sorted(tokens, key=len, reverse=True)
    return re.compile("(" + "|".join(map(re.escape, ordered)) + ")" if ordered else r"((?!))")


def _without_first_space(state: dict[str, Any]) -> dict[str, Any]:
    """Disable the space that SentencePiece-like tokenizers add before a text and remove when decoding.

    Our texts are pieces from the middle of a dialogue, so they must keep exactly the spaces they have.
    """
    changed = _replaced(state.get("pre_tokenizer"), {"type": "Metaspace", "prepend_scheme": "first"})
    if changed is None:
        return state
    decoder = _replaced(state.get("decoder"), {"type": "Metaspace", "prepend_scheme": "first"}) or state.get("decoder")
    if decoder and decoder["type"] == "Sequence":
        kept = [d for d in decoder["decoders"] if not (d["type"] == "Strip" and d["start"] == 1)]
        decoder = {**decoder, "decoders": kept}
    return {**state, "pre_tokenizer": changed, "decoder": decoder}


def _replaced(node: dict[str, Any] | None, wanted: dict[str, Any]) -> dict[str, Any] | None:
    """The node, or the sequence that contains it, with prepend_scheme `never`; None where it is absent."""
    if node is None:
        return None
    if wanted.items() <= node.items():
        return {**node, "prepend_scheme": "never"}
    key = next((k for k in ("pretokenizers", "decoders") if k in node), None)
    if key is None:
        return None
    parts = [_replaced(part, wanted) for part in node[key]]
    if not any(parts):
        return None
    return {**node, key: [new or old for new, old in zip(parts, node[key], strict=True)]}
