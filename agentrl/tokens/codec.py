"""Text <-> token ids, with added tokens where we say so and nowhere else. Knows no template and no dialogue.

Two tokenizers of one vocabulary: the model's, and the same without its added tokens. By the second one a text such as
`<|im_end|>` is encoded as the characters that it is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

MAX_TOKEN_CHARS = 128
"""Longer tokens are rare; a text is cut to what this many characters a token can need before it is encoded."""

MAX_CACHED_CHARS = 32
"""Texts up to this length are encoded once: the template's own pieces come with every turn."""
MAX_CACHED_TEXTS = 4096


class Codec:
    """Encodes and decodes for one vocabulary.

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
        self._spoken_tokens = _any_of([token.content for token in added.values() if not token.special])

    def encode(self, text: str) -> list[int]:
        """Content: whatever it says, no added token comes of it."""
        if len(text) > MAX_CACHED_CHARS:
            return list(self._literal.encode(text, add_special_tokens=False).ids)
        if text not in self._short:
            if len(self._short) >= MAX_CACHED_TEXTS:
                self._short.clear()
            self._short[text] = tuple(self._literal.encode(text, add_special_tokens=False).ids)
        return list(self._short[text])

    def encode_whole(self, text: str) -> list[int]:
        """A whole dialogue as the model's own tokenizer reads it, added tokens and all."""
        ids: list[int] = self._original.encode(text, add_special_tokens=False).ids
        return ids

    def encode_parts(self, parts: Sequence[str | int]) -> list[int]:
        """Ids stand; neighbouring texts are encoded as one run, as the model saw them in pre-training."""
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
        """The template's own text as added-token ids and the text between them."""
        return self._split(text, self._glue_tokens)

    def spoken(self, text: str) -> list[str | int]:
        """What a model writes: markers such as `<tool_call>` are tokens; those that end a turn are not."""
        return self._split(text, self._spoken_tokens)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of any ids, special tokens spelled out."""
        text: str = self._backend.decode(list(token_ids), skip_special_tokens=False)
        return text

    def decode_marked(self, token_ids: Sequence[int], marker: str) -> tuple[str, list[int] | None]:
        """The text, and where in it `marker` stands as a token of its own. None: the vocabulary has no such token."""
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
        """At most `max_tokens` tokens of `text`; a note stands for what was cut.

        `keep`: the `head`, the `tail`, or `both` with the middle cut.
        """
        if len(text) < max_tokens and len(text.encode()) < max_tokens:
            return text  # a token holds a byte at least
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
    """At most `max_chars` characters of `text`, and a note where some are missing."""
    if len(text) <= max_chars:
        return text
    num_tail = {"both": max_chars // 2, "head": 0, "tail": max_chars}[keep]
    return text[: max_chars - num_tail] + note + text[len(text) - num_tail :]


def _ends(text: str, offsets: Sequence[tuple[int, int]], num_head: int, num_tail: int, note: str) -> str:
    """That many tokens of both ends, and the note between them."""
    head = text[: offsets[num_head - 1][1]] if num_head else ""
    return head + note + (text[offsets[-num_tail][0] :] if num_tail else "")


def _any_of(tokens: Iterable[str]) -> re.Pattern[str]:
    """A pattern with one group that matches any of `tokens`, longest first; never matches when there are none."""
    ordered = sorted(tokens, key=len, reverse=True)
    return re.compile("(" + "|".join(map(re.escape, ordered)) + ")" if ordered else r"((?!))")


def _without_first_space(state: dict[str, Any]) -> dict[str, Any]:
    """SentencePiece-like tokenizers put a space before the first word of a text and take it off when decoding.

    Ours are pieces from the middle of a dialogue, which has its first token before them: they get none and lose none.
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
    """The node, or the sequence it stands in, with prepend_scheme `never`; None where it is not there."""
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
