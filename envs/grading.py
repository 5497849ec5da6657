"""Boxed answers: extraction, exact integers, and symbolic equality in a process that can be killed.

Independent of episodes. A grader that fails raises EnvError; it never returns "wrong" for its own failure.
"""

from __future__ import annotations

import asyncio
import re

from agentrl.errors import EnvError
from envs.equality_pool import EqualityPool

MAX_NUMBER_CHARACTERS = 200
_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)  # an escaped brace does not count
_INTEGER = re.compile(r"[+-]?[0-9]+")
_THOUSANDS = re.compile(r"(?<![0-9,.}])[0-9]{1,3}(?:(?:,|\{,\}|\\,|\\!,|,\\!)[0-9]{3})+(?![0-9]|,[0-9])")
_WRAPPED = re.compile(r"^(?:\$(.*)\$|\\(?:text|textbf|mathbf|mathrm|boldsymbol|mbox)\s*\{([^{}]*)\})$")
_UNIT = r"\\(?:text|mbox|mathrm|textrm|textit|mathit)\s*\{[^{}0-9]*\}(?:\^\{?[23]\}?)?"
_DRESSED = re.compile(
    rf"^(?:[A-Za-z]\s*=\s*)?([+-]?)\s*(?:\\?\$)?([0-9].*?)(?:\.0*)?(?:\\[,;! ]|[\s~])*"
    rf"(?:\\?[%$]|\^\{{?\\circ\}}?|\\degree|°|{_UNIT})?$"
)
_LIST = re.compile(r",|;|\band\b|\bor\b|\\text\s*\{\s*(?:and|or)\s*\}")
_AIME = re.compile("0*[0-9]{1,3}")
_DROPPED = re.compile(r"\\left|\\right|\\!|\\,|\\;|\\:|\\ |\s|\$|(?<!\\)~")
_DEGREES = re.compile(r"\^\{?\\circ\}?|\\degree|°")
_TEXT = re.compile(r"\\(?:text|mbox|textbf|textit|mathrm|textrm)\s*\{([^{}]*)\}")


def final_answer(text: str) -> str | None:
    """The content of the last balanced `\\boxed{}` outside `<think>`, or None.

    >>> final_answer(r"First \\boxed{1}, no: \\boxed{\\frac{1}{2}}.")
    '\\\\frac{1}{2}'
    """
    text = text.rpartition("</think>")[2].partition("<think>")[0]  # the second part: a thought that never ended
    starts = {match.end() for match in _BOX.finditer(text)}
    open_braces: list[int] = []
    last_start, last_end = -1, -1
    for match in _BRACE.finditer(text):
        if match[0] == "{":
            open_braces.append(match.end())
        elif match[0] == "}" and open_braces and (start := open_braces.pop()) in starts and start > last_start:
            last_start, last_end = start, match.start()
    return None if last_start < 0 else text[last_start:last_end].strip()


def aime_integer(text: str) -> int | None:
    """The boxed answer if it is an integer from 0 to 999 as AIME writes it (leading zeros allowed), else None."""
    answer = final_answer(text)
    return int(answer) if answer is not None and _AIME.fullmatch(answer) else None


async def is_correct(text: str, gold: str) -> bool:
    """Whether the final answer in `text` equals `gold`.

    If the gold answer is an integer, the answer must be one number that equals it: `1,005`, `\\$5.00`, `5\\text{ m}`
    and `x = 5` are numbers, `4+1` and `10/2` are not. Other answers are compared by their normalised text, then by
    math-verify.
    Raises EnvError when the grader failed, MissingDependencyError without math-verify.
    """
    if not gold.strip():
        raise EnvError("the gold answer is blank: nothing can be graded against it")
    answer = final_answer(text)
    if not answer:
        return False
    gold_integer = _as_integer(gold)
    if gold_integer is not None:
        return _as_integer(_number_in(answer)) == gold_integer
    if normalised(answer) == normalised(gold):
        return True
    if not _LIST.search(_without_separators(gold)) and _LIST.search(_without_separators(answer)):
        return False  # math-verify reads a list as a set, which hides an answer that occurs twice
    return await asyncio.to_thread(EqualityPool.shared().equal, gold, answer)


def normalised(answer: str) -> str:
    """LaTeX in a normal form, without spacing, `\\dfrac`, `\\left`, `\\text`, degree signs, end stops."""
    answer = _TEXT.sub(lambda match: match[1], answer)
    answer = _DEGREES.sub("", answer)
    answer = _DROPPED.sub("", answer)
    for old, new in (("\\dfrac", "\\frac"), ("\\tfrac", "\\frac"), ("\\%", "%"), ("\\{", "{"), ("\\}", "}")):
        answer = answer.replace(old, new)
    return answer.rstrip(".")


def _as_integer(answer: str) -> int | None:
    """The value of an answer that is one integer; `$`, sign and thousands separators are allowed. Else None."""
    answer = _without_separators(answer.strip().strip("$").strip().rstrip("."))
    if len(answer) > 4000 or not _INTEGER.fullmatch(answer):  # int() refuses more digits
        return None
    return int(answer)


def _number_in(answer: str) -> str:
    """The number in an answer, without a name, currency, unit, or zeros after the point."""
    if len(answer) > MAX_NUMBER_CHARACTERS:
        return answer
    answer = answer.replace("−", "-").strip()
    while (inner := _WRAPPED.sub(r"\1\2", answer).strip()) != answer:
        answer = inner
    return _DRESSED.sub(r"\1\2", answer)


def _without_separators(answer: str) -> str:
    return _THOUSANDS.sub(lambda match: re.sub("[^0-9+-]", "", match[0]), answer)
