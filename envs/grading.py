"""Boxed answers: extraction, exact integers, and symbolic equality in a process that can be killed.

Knows nothing of episodes. A grader that fails raises EnvError; it never returns "wrong" for a failure of its own.
"""

from __future__ import annotations

import asyncio
import re

from agentrl.errors import EnvError
from envs.equality_pool import EqualityPool

_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_INTEGER = re.compile(r"[+-]?[0-9]+")
_THOUSANDS = re.compile(r"[+-]?[0-9]{1,3}(?:(?:,|\{,\}|\\,|\\!,|,\\!)[0-9]{3})+")
_AIME = re.compile("0*[0-9]{1,3}")
_DROPPED = re.compile(r"\\left|\\right|\\!|\\,|\\;|\\:|\\ |\s|\$|(?<!\\)~")
_DEGREES = re.compile(r"\^\{?\\circ\}?|\\degree|°")
_TEXT = re.compile(r"\\(?:text|mbox|textbf|textit|mathrm|textrm)\s*\{([^{}]*)\}")


def final_answer(text: str) -> str | None:
    """The content of the last balanced `\\boxed{}` after any `</think>`; None when there is none."""
    text = text.rpartition("</think>")[2]
    found: str | None = None
    for match in _BOX.finditer(text):
        content = _balanced(text, match.end())
        if content is not None:
            found = content.strip()
    return found


def aime_integer(text: str) -> int | None:
    """The boxed answer if it is an integer from 0 to 999 as AIME writes it (leading zeros allowed), else None."""
    answer = final_answer(text)
    return int(answer) if answer is not None and _AIME.fullmatch(answer) else None


async def is_correct(text: str, gold: str) -> bool:
    """Whether the final answer in `text` equals `gold`.

    Integers are compared as integers and nothing else; other answers by their normalised text, then by math-verify.
    Raises EnvError when the grader failed, MissingDependencyError without math-verify.
    """
    if not gold.strip():
        raise EnvError("the gold answer is blank: nothing can be graded against it")
    answer = final_answer(text)
    if not answer:
        return False
    gold_integer = _as_integer(gold)
    if gold_integer is not None:
        return _as_integer(answer) == gold_integer
    if normalised(answer) == normalised(gold):
        return True
    return await asyncio.to_thread(EqualityPool.shared().equal, gold, answer)


def normalised(answer: str) -> str:
    """LaTeX with the freedoms of writing removed: spacing, `\\dfrac`, `\\left`, `\\text`, degree signs, end stops."""
    answer = _TEXT.sub(lambda match: match[1], answer)
    answer = _DEGREES.sub("", answer)
    answer = _DROPPED.sub("", answer)
    for old, new in (("\\dfrac", "\\frac"), ("\\tfrac", "\\frac"), ("\\%", "%"), ("\\{", "{"), ("\\}", "}")):
        answer = answer.replace(old, new)
    return answer.rstrip(".")


def _as_integer(answer: str) -> int | None:
    """An answer that is written as one integer, `$`, sign and thousands separators allowed."""
    answer = answer.strip().strip("$").strip().rstrip(".")
    if _THOUSANDS.fullmatch(answer):
        answer = re.sub("[^0-9+-]", "", answer)
    if len(answer) > 4000 or not _INTEGER.fullmatch(answer):  # int() refuses more digits
        return None
    return int(answer)


def _balanced(text: str, start: int) -> str | None:
    """Text from `start` to the brace that closes one opened before it; escaped braces do not count."""
    depth, position = 1, start
    while position < len(text):
        character = text[position]
        if character == "\\":
            position += 2
            continue
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return text[start:position]
        position += 1
    return None
