"""Environments that are broken in one way each, as source text, with what the check must say of them."""

from __future__ import annotations

from dataclasses import dataclass
from textwrap import dedent, indent

IMPORTS = "from agentrl import Env, Message, StepResult, Task, ToolEnv, ToolError, tool, user\n"
PARTS = {
    "tasks": '''
        @classmethod
        def tasks(cls, split, *, data=None, seed=0):
            return [Task(id=str(n), prompt=f"What is {n} + 1?", answer=str(n + 1)) for n in range(4)]
        ''',
    "reset": '''
        async def reset(self, *, task, seed=None):
            return [user(task.prompt)], {}
        ''',
    "look": '''
        @tool
        async def look(self, word: str) -> str:
            """Look a word up."""
            return word.upper()
        ''',
    "score": '''
        async def score(self, episode):
            return {"correct": float(f"boxed{{{episode.task.answer}}}" in episode.final_text)}
        ''',
}


def source(base: str = "ToolEnv", before: str = "", **parts: str) -> str:
    """The file of an environment `Broken`: sound, but for the parts that are given."""
    body = "\n".join(dedent(part).strip("\n") for part in (PARTS | parts).values())
    return f'{IMPORTS}{before}\n\nclass Broken({base}):\n    """Adds one."""\n\n{indent(body, "    ")}\n'


@dataclass(frozen=True)
class Broken:
    """`check` fails, or warns, and says `said` (a regular expression)."""

    text: str
    check: str
    said: str
    is_warning: bool = False
    data: str | None = None


def score(line: str) -> str:
    return source(score=f"async def score(self, episode):\n    {line}")


def tasks(line: str) -> str:
    return source(tasks=f"@classmethod\ndef tasks(cls, split, *, data=None, seed=0):\n    {line}")


def reset(line: str) -> str:
    return source(reset=f"async def reset(self, *, task, seed=None):\n    {line}")


def look(line: str, before: str = "") -> str:
    body = f'@tool\nasync def look(self, word: str) -> str:\n    """Look a word up."""\n    {line}'
    return source(before=before, look=body)


CASES = {
    "score-text": Broken(score('return "correct"'), "", ""),
    "score-text-value": Broken(score('return {"correct": "yes"}'), "", ""),
    "score-nan": Broken(score('return {"correct": float("nan")}'), "", ""),
    "score-none": Broken(score("pass"), "", ""),
    "score-int": Broken(score("return 1"), "", ""),
    "score-unknown-name": Broken(score('return {"correct": 1.0, "style": 0.5}'), "", ""),
    "score-other-names": Broken(
        score('return {"correct": 1.0} if "boxed" in episode.final_text else {"style": 1.0}'), "", ""
    ),
    "score-raises": Broken(score('return {"correct": float(episode.task.metadata["gold"])}'), "", ""),
    "score-hangs": Broken(score("import asyncio; await asyncio.sleep(1000)"), "", ""),
    "score-outside": Broken(
        score('return {"correct": 5.0 if f"{{{episode.task.answer}}}" in episode.final_text else -5.0}'), "", ""
    ),
    "score-random": Broken(score('import random; return {"correct": random.random()}'), "", ""),
    "score-always-right": Broken(score('return {"correct": 1.0}'), "", ""),
    "tasks-no-classmethod": Broken(
        source(tasks="def tasks(self, split, *, data=None, seed=0):\n    return []"), "", ""
    ),
    "tasks-async": Broken(
        source(tasks="@classmethod\nasync def tasks(cls, split, *, data=None, seed=0):\n    return []"), "", ""
    ),
    "tasks-no-data": Broken(source(tasks="@classmethod\ndef tasks(cls, split):\n    return []"), "", ""),
    "tasks-none": Broken(tasks("pass"), "", ""),
    "tasks-empty": Broken(tasks("return []"), "", ""),
    "tasks-dicts": Broken(tasks('yield {"id": "a", "prompt": "q", "answer": "25"}'), "", ""),
    "tasks-positional": Broken(tasks('yield Task("a", "q", "25")'), "", ""),
    "tasks-number-answer": Broken(tasks('yield Task(id="a", prompt="q", answer=25)'), "", ""),
    "tasks-number-id": Broken(tasks('yield Task(id=1, prompt="q", answer="25")'), "", ""),
    "tasks-endless": Broken(
        tasks('import itertools; yield from (Task(id=str(n), prompt="q") for n in itertools.count())'), "", ""
    ),
    "tasks-twice": Broken(tasks('return [Task(id="a", prompt="q", answer="25")] * 2'), "", ""),
    "tasks-hang": Broken(tasks("import time; time.sleep(1000)"), "", ""),
    "tasks-raise": Broken(tasks('return open("no-such-file.jsonl")'), "", ""),
    "reset-none": Broken(reset("pass"), "", ""),
    "reset-one-value": Broken(reset("return [user(task.prompt)]"), "", ""),
    "reset-two-messages": Broken(reset("return [user(task.prompt), user('now')]"), "", ""),
    "reset-text": Broken(reset("return task.prompt"), "", ""),
    "reset-text-info": Broken(reset("return task.prompt, {}"), "", ""),
    "reset-dicts": Broken(reset('return [{"role": "user", "content": task.prompt}], {}'), "", ""),
    "reset-number-content": Broken(reset("return [user(25)], {}"), "", ""),
    "reset-no-message": Broken(reset("return [], {}"), "", ""),
    "reset-assistant": Broken(reset('return [Message(role="assistant", content="I")], {}'), "", ""),
    "reset-no-seed": Broken(source(reset="async def reset(self, task):\n    return [user(task.prompt)], {}"), "", ""),
    "reset-hangs": Broken(reset("import asyncio; await asyncio.sleep(1000)"), "", ""),
    "reset-blocks": Broken(reset("import time; time.sleep(1000)"), "", ""),
    "reset-raises": Broken(reset("return [user(task.metadata['text'])], {}"), "", ""),
    "step-none": Broken(source("Env", look="async def step(self, action):\n    pass"), "", ""),
    "step-three-values": Broken(source("Env", look="async def step(self, action):\n    return [], 1.0, True"), "", ""),
    "step-text": Broken(
        source("Env", look='async def step(self, action):\n    return StepResult("well", 0.0, True, False, {})'), "", ""
    ),
    "step-text-reward": Broken(
        source("Env", look='async def step(self, action):\n    return StepResult([], "1", True, False, {})'), "", ""
    ),
    "step-no-info": Broken(
        source("Env", look="async def step(self, action):\n    return StepResult([], 1.0, True, False, None)"), "", ""
    ),
    "step-no-observation": Broken(
        source("Env", look="async def step(self, action):\n    return StepResult([], 0.0, False, False, {})"), "", ""
    ),
    "step-missing": Broken(source("Env"), "", ""),
    "tools-of-env": Broken(
        source("Env", step="async def step(self, action):\n    return StepResult([], 0.0, True, False, {})"), "", ""
    ),
    "tool-object": Broken(look("return object()"), "", ""),
    "tool-none": Broken(look("word.upper()"), "", ""),
    "tool-number": Broken(look("return len(word)"), "", ""),
    "tool-raises": Broken(look('return {"a": "b"}[word]'), "", ""),
    "tool-sleeps": Broken(look("import time; time.sleep(1000)"), "", ""),
    "tool-hangs": Broken(look("import asyncio; await asyncio.sleep(1000)"), "", ""),
    "tool-thread-sleeps": Broken(
        source(look='@tool\ndef look(self, word: str) -> str:\n    """Look."""\n    import time; time.sleep(1000)'),
        "",
        "",
    ),
    "tool-exits": Broken(look("import sys; sys.exit(3)"), "", ""),
    "tool-10-mb": Broken(look('return "x" * 10_000_000'), "", ""),
    "tool-no-hint": Broken(source(look='@tool\nasync def look(self, word):\n    """Look."""\n    return word'), "", ""),
    "tool-no-docstring": Broken(source(look="@tool\nasync def look(self, word: str) -> str:\n    return word"), "", ""),
    "tool-no-self": Broken(
        source(look='@tool\nasync def look(word: str) -> str:\n    """Look."""\n    return word'), "", ""
    ),
    "open-shared-hangs": Broken(
        source(
            before="import asyncio\nfrom contextlib import asynccontextmanager",
            shared="@classmethod\n@asynccontextmanager\nasync def open_shared(cls):\n    await asyncio.sleep(1000)\n    yield 1",
        ),
        "",
        "",
    ),
    "open-shared-plain": Broken(source(shared="@classmethod\nasync def open_shared(cls):\n    return 1"), "", ""),
    "open-shared-raises": Broken(
        source(
            before="from contextlib import asynccontextmanager",
            shared="@classmethod\n@asynccontextmanager\nasync def open_shared(cls):\n    open('no-such-index')\n    yield 1",
        ),
        "",
        "",
    ),
    "close-raises": Broken(source(close="async def close(self):\n    self.file.close()"), "", ""),
    "close-hangs": Broken(source(close="async def close(self):\n    import asyncio; await asyncio.sleep(1000)"), "", ""),
    "init-argument": Broken(source(init="def __init__(self, size):\n    self.size = size"), "", ""),
    "init-raises": Broken(source(init="def __init__(self):\n    self.size = int('ten')"), "", ""),
    "demonstrations-raise": Broken(
        source(more="@classmethod\ndef demonstrations(cls, task, *, skill=1.0, seed=0):\n    return [task.script]"), "", ""
    ),
    "demonstrations-texts": Broken(
        source(more="@classmethod\ndef demonstrations(cls, task, *, skill=1.0, seed=0):\n    return ['25']"), "", ""
    ),
    "phrase-raises": Broken(source(more="@classmethod\ndef phrase(cls, answer):\n    return answer['text']"), "", ""),
    "prints": Broken(look('print("looking", flush=True); return word'), "", ""),
    "plain-score": Broken(
        source(score='def score(self, episode):\n    return {"correct": float(f"{{{episode.task.answer}}}" in episode.final_text)}'),
        "",
        "",
    ),
    "import-error": Broken(source(before="import no_such_module_here"), "", ""),
    "syntax-error": Broken(source(before="def broken(:"), "", ""),
    "import-exits": Broken(source(before="raise SystemExit('no')"), "", ""),
    "import-hangs": Broken(source(before="import time; time.sleep(1000)"), "", ""),
    "other-class": Broken(source().replace("class Broken", "class Brocken"), "", ""),
    "not-an-env": Broken("class Broken:\n    pass\n", "", ""),
}
