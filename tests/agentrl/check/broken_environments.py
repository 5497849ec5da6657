# ruff: noqa: E501 (a wrapped source or pattern is harder to read)
"""Environments that are broken in one way each, as source text, with what the check must say of them."""

from __future__ import annotations

from dataclasses import dataclass
from textwrap import dedent, indent

IMPORTS = "from agentrl import Env, Message, StepResult, Task, ToolEnv, ToolError, tool, user\n"
PARTS = {
    "tasks": """
        @classmethod
        def tasks(cls, split, *, data=None, seed=0):
            return [Task(id=str(n), prompt=f"What is {n} + 1?", answer=str(n + 1)) for n in range(4)]
        """,
    "reset": """
        async def reset(self, *, task, seed=None):
            return [user(task.prompt)], {}
        """,
    "look": '''
        @tool
        async def look(self, word: str) -> str:
            """Look a word up."""
            return word.upper()
        ''',
    "score": """
        async def score(self, episode):
            return {"correct": float(f"boxed{{{episode.task.answer}}}" in episode.final_text)}
        """,
}


def source(base: str = "ToolEnv", before: str = "", **parts: str) -> str:
    """The file of an environment `Broken`: sound, but for the parts that are given."""
    body = "\n".join(dedent(part).strip("\n") for part in (PARTS | parts).values())
    return f'{IMPORTS}{before}\n\nclass Broken({base}):\n    """Adds one."""\n\n{indent(body, "    ")}\n'


@dataclass(frozen=True)
class Broken:
    """`check` fails, or warns, and says `said`: a regular expression, in which FILE stands for the file's path.

    The check `loading`: a ConfigError before any check.
    """

    text: str
    check: str
    said: str
    warns: bool = False


def score(line: str) -> str:
    return source(score=f"async def score(self, episode):\n    {line}")


def grouped(line: str, more: str = "") -> str:
    """`score_group` is `line`; `reset` keeps the task."""
    return source(
        before="from agentrl.env import Episode\n",
        reset="async def reset(self, *, task, seed=None):\n    self.task = task\n    return [user(task.prompt)], {}",
        weights='reward_weights = {"correct": 1.0, "brief": 0.1}',
        group=f"async def score_group(self, episodes):\n    {line}",
        more=more,
    )


def tasks(line: str) -> str:
    return source(tasks=f"@classmethod\ndef tasks(cls, split, *, data=None, seed=0):\n    {line}")


def reset(line: str) -> str:
    return source(reset=f"async def reset(self, *, task, seed=None):\n    {line}")


def look(line: str, before: str = "") -> str:
    body = f'@tool\nasync def look(self, word: str) -> str:\n    """Look a word up."""\n    {line}'
    return source(before=before, look=body)


SHARED = "@classmethod\n@contextlib.asynccontextmanager\nasync def open_shared(cls):\n"

CASES = {
    "score-text": Broken(
        score('return "correct"'),
        "one turn",
        r"""Broken.score returned 'correct' \(str\): return a dict of named rewards: `return \{\"correct\": 1.0\}` \(FILE:16\)""",
    ),
    "score-text-value": Broken(
        score('return {"correct": "yes"}'),
        "one turn",
        r"the reward 'correct' is 'yes' \(str\): return a number \(FILE:16\)",
    ),
    "score-nan": Broken(
        score('return {"correct": float("nan")}'), "one turn", r"returned correct=nan: it must be finite \(FILE:16\)"
    ),
    "score-none": Broken(score("pass"), "one turn", r"Broken.score returned None: return a dict"),
    "score-int": Broken(score("return 1"), "one turn", r"Broken.score returned 1 \(int\): return a dict"),
    "score-unknown-name": Broken(
        score('return {"correct": 1.0, "style": 0.5}'),
        "one turn",
        r"returned 'style', which reward_weights does not name.*`reward_weights = \{'correct': 1.0, 'style': 1.0\}` \(FILE:16\)",
    ),
    "score-other-names": Broken(
        score('return {"correct": 1.0} if "boxed" in episode.final_text else {"style": 1.0}'),
        "one turn",
        r"returned 'style', which reward_weights does not name",
    ),
    "score-raises": Broken(
        score('return {"correct": float(episode.task.metadata["gold"])}'),
        "one turn",
        r"score of task 0: KeyError: 'gold' \(FILE:17\)",
    ),
    "score-hangs": Broken(
        score("import asyncio; await asyncio.sleep(1000)"),
        "one turn",
        r"Broken.score did not return within 1 s; it waits at FILE:17. If it is slow and does not hang: --timeout",
    ),
    "group-short": Broken(
        grouped('return [{"brief": 1.0}]'),
        "group score",
        r"Broken.score_group returned 1 rewards for 2 episodes: return one dict for each episode, in order \(FILE:\d+\)",
    ),
    "group-of-one": Broken(
        grouped('low, high = [0.0, 1.0][:len(episodes)]; return [{"brief": low}, {"brief": high}]'),
        "group score",
        r"Broken.score_group of task 0: ValueError: not enough values to unpack .*FILE:\d+",
    ),
    "group-close": Broken(
        grouped(
            'return [{"brief": 1.0} for _ in episodes]', more="async def close(self):\n    self.last = self.task.id"
        ),
        "group score",
        r"Broken.close of an object that scored a group, without reset: AttributeError: .*FILE:\d+",
    ),
    "score-outside": Broken(
        score('return {"correct": 5.0 if f"{{{episode.task.answer}}}" in episode.final_text else -5.0}'),
        "reward range",
        r"rewards from -5 to 5 .*pass@k counts an episode as solved from 1.0",
        warns=True,
    ),
    "score-random": Broken(
        score('import random; return {"correct": random.random()}'),
        "repeatable",
        r"the same episode scored .*: take what is random from the `seed`.* \(FILE:16\)",
    ),
    "score-always-right": Broken(
        score('return {"correct": 1.0}'),
        "answers",
        r"4 of 4 tasks fail:\n  task 0: the wrong answer '2' scored 1 \(gold '1' scored 1\): change score \(FILE:16\)",
    ),
    "tasks-no-classmethod": Broken(
        source(tasks="def tasks(self, split, *, data=None, seed=0):\n    return []"),
        "tasks",
        r"Broken.tasks is not a classmethod: write `@classmethod` above it \(FILE:7\)",
    ),
    "tasks-async": Broken(
        source(tasks="@classmethod\nasync def tasks(cls, split, *, data=None, seed=0):\n    return []"),
        "tasks",
        r"Broken.tasks is `async`: write `def tasks`, without async \(FILE:7\)",
    ),
    "tasks-no-data": Broken(
        source(tasks="@classmethod\ndef tasks(cls, split):\n    return []"),
        "tasks",
        r"TypeError: .*'data'; write `@classmethod def tasks\(cls, split, \*, data=None, seed=0\)` \(FILE:7\)",
    ),
    "tasks-none": Broken(
        tasks("pass"), "tasks", r"Broken.tasks returned None: return a list of tasks, or yield them: `Task\("
    ),
    "tasks-empty": Broken(tasks("return []"), "tasks", r"gives no tasks"),
    "tasks-dicts": Broken(
        tasks('yield {"id": "a", "prompt": "q", "answer": "25"}'),
        "tasks",
        r"""Broken.tasks gave \{'id': 'a'.* \(dict\): a row is a `Task\(id=\"a\".*\(FILE:9\)""",
    ),
    "tasks-positional": Broken(
        tasks('yield Task("a", "q", "25")'),
        "tasks",
        r"""; Task's fields are given by name: `Task\(id=\"a\", .*\(FILE:9\)""",
    ),
    "tasks-number-answer": Broken(
        tasks('yield Task(id="a", prompt="q", answer=25)'),
        "tasks",
        r"the answer of task 'a' is 25 \(int\): write answer='25' \(FILE:9\)",
    ),
    "tasks-number-id": Broken(
        tasks('yield Task(id=1, prompt="q", answer="25")'),
        "tasks",
        r"the id of task 1 is 1 \(int\): write id='1' \(FILE:9\)",
    ),
    "tasks-metadata": Broken(
        tasks('yield Task(id="a", prompt="q", metadata={"solve": print})'),
        "tasks",
        r"task 'a' cannot be saved with its episodes: .*function.* in its metadata \(FILE:9\)",
    ),
    "tasks-endless": Broken(
        tasks('import itertools; yield from (Task(id=str(n), prompt="q") for n in itertools.count())'),
        "tasks",
        r"gives more than 20,000 tasks: it must end",
    ),
    "tasks-twice": Broken(
        tasks('return [Task(id="a", prompt="q", answer="25")] * 2'),
        "tasks",
        r"the id 'a' is used twice; give each task its own \(FILE:7\)",
    ),
    "tasks-hang": Broken(
        tasks("import time; time.sleep(20)"), "tasks", r"Broken.tasks did not return within 1 s; it waits at FILE:9"
    ),
    "tasks-raise": Broken(
        tasks('return open("no-such-file.jsonl")'), "tasks", r"FileNotFoundError: .*no-such-file.jsonl' \(FILE:9\)"
    ),
    "reset-none": Broken(
        reset("pass"),
        "one turn",
        r"Broken.reset returned None: write `return \[user\(task.prompt\)\], \{\}` \(FILE:10\)",
    ),
    "reset-one-value": Broken(
        reset("return [user(task.prompt)]"), "one turn", r"Broken.reset returned \[Message.* \(list\): write `return"
    ),
    "reset-two-messages": Broken(
        reset("return [user(task.prompt), user('now')]"),
        "one turn",
        r"Broken.reset returned \[Message.* \(list\): write `return",
    ),
    "reset-text": Broken(
        reset("return task.prompt"), "one turn", r"Broken.reset returned 'What is 0 \+ 1\?' \(str\): write `return"
    ),
    "reset-text-info": Broken(
        reset("return task.prompt, {}"),
        "one turn",
        r"Broken.reset: its messages are 'What is 0 \+ 1\?' \(str\): write `return",
    ),
    "reset-dicts": Broken(
        reset('return [{"role": "user", "content": task.prompt}], {}'),
        "one turn",
        r"""Broken.reset gave \{'role': .* \(dict\): a message is `user\(\"text\"\)`""",
    ),
    "reset-number-content": Broken(
        reset("return [user(25)], {}"), "one turn", r"a message's content is 25 \(int\): write text"
    ),
    "reset-no-message": Broken(
        reset("return [], {}"), "one turn", r"Broken.reset of task 0 returned no message: write `return"
    ),
    "reset-assistant": Broken(
        reset('return [Message(role="assistant", content="I")], {}'),
        "one turn",
        r"its last message is the model's own: end with user",
    ),
    "reset-no-seed": Broken(
        source(reset="async def reset(self, task):\n    return [user(task.prompt)], {}"),
        "one turn",
        r"unexpected keyword argument 'seed'; write `async def reset\(self, \*, task, seed=None\)` \(FILE:10\)",
    ),
    "reset-hangs": Broken(
        reset("import asyncio; await asyncio.sleep(1000)"),
        "one turn",
        r"Broken.reset did not return within 1 s; it waits at FILE:11",
    ),
    "reset-raises": Broken(
        reset("return [user(task.metadata['text'])], {}"), "one turn", r"reset of task 0: KeyError: 'text' \(FILE:11\)"
    ),
    "reset-raises-a-book": Broken(
        reset("raise ValueError('x' * 300_000 + '\\ud800')"), "one turn", r"ValueError: x{2000}\.\.\. \(FILE:11\)"
    ),
    "step-none": Broken(
        source("Env", look="async def step(self, action):\n    pass"),
        "one turn",
        r"Broken.step returned None: write `return StepResult\(",
    ),
    "step-three-values": Broken(
        source("Env", look="async def step(self, action):\n    return [], 1.0, True"),
        "one turn",
        r"Broken.step returned \(\[\], 1.0, True\) \(tuple\): write `return StepResult\(",
    ),
    "step-text": Broken(
        source("Env", look='async def step(self, action):\n    return StepResult("well", 0.0, True, False, {})'),
        "one turn",
        r"Broken.step: its messages are 'well' \(str\): write `return StepResult\(",
    ),
    "step-text-reward": Broken(
        source("Env", look='async def step(self, action):\n    return StepResult([], "1", True, False, {})'),
        "one turn",
        r"Broken.step: its reward is '1' \(str\): return a number",
    ),
    "step-no-info": Broken(
        source("Env", look="async def step(self, action):\n    return StepResult([], 1.0, True, False, None)"),
        "one turn",
        r"Broken.step: its info is None: return a dict",
    ),
    "step-no-observation": Broken(
        source("Env", look="async def step(self, action):\n    return StepResult([], 0.0, False, False, {})"),
        "one turn",
        r"returned no observation, but did not end the episode: return a message, or terminated=True",
    ),
    "step-missing": Broken(
        source("Env"),
        "loading",
        r"it does not define step: write `async def step\(self, action\)`, or derive the class from ToolEnv \(FILE:4\)",
    ),
    "tools-of-env": Broken(
        source("Env", step="async def step(self, action):\n    return StepResult([], 0.0, True, False, {})"),
        "tools",
        r"has @tool methods \(look\), which only a ToolEnv offers to the model: write `class Broken\(ToolEnv\):` \(FILE:4\)",
    ),
    "tool-object": Broken(
        look("return object()"),
        "tool look",
        r"a value of type object, which cannot be shown to a model as JSON: return text.* \(FILE:12\)",
    ),
    "tool-none": Broken(
        look("word.upper()"),
        "tool look",
        r"look returned None, which the model reads as `null`: return text",
        warns=True,
    ),
    "tool-raises": Broken(
        look('return {"a": "b"}[word]'),
        "tool look",
        r"tool look: KeyError: 'print\(1 \+ 1\)' \(FILE:15\). Is it the model's mistake\? `raise ToolError\(text\)`",
    ),
    "tool-hangs": Broken(
        look("import asyncio; await asyncio.sleep(1000)"),
        "tool calls",
        r"Broken.step with a call of look did not return within 1 s; it waits at FILE:15",
    ),
    "tool-thread-sleeps": Broken(
        source(look='@tool\ndef look(self, word: str) -> str:\n    """Look."""\n    import time; time.sleep(20)'),
        "tool calls",
        r"Broken.step with a call of look did not return within 1 s; it waits at FILE:15",
    ),
    "tool-exits": Broken(
        look("import sys; sys.exit(3)"),
        "tool look",
        r"tool look called sys.exit\(3\): raise an exception instead \(FILE:15\)",
    ),
    "tool-10-mb": Broken(
        look('return "x" * 10_000_000'),
        "tool look",
        r"look answered with 10.0 MB. The model is shown rollout.tool_output_tokens of it \(128 by default\)",
        warns=True,
    ),
    "tool-no-hint": Broken(
        source(look='@tool\nasync def look(self, word):\n    """Look."""\n    return word'),
        "loading",
        r"tool Broken.look \(FILE:12\): parameter 'word' needs a type hint, such as `word: str`",
    ),
    "tool-no-docstring": Broken(
        source(look="@tool\nasync def look(self, word: str) -> str:\n    return word"),
        "loading",
        r"tool Broken.look \(FILE:12\) has no docstring, the description that the model reads: write one below",
    ),
    "tool-no-self": Broken(
        source(look='@tool\nasync def look(word: str) -> str:\n    """Look."""\n    return word'),
        "loading",
        r"tool Broken.look \(FILE:12\): its first parameter must be `self`: write `\(self, word\)`",
    ),
    "open-shared-hangs": Broken(
        source(
            before="import asyncio, contextlib",
            shared=f"{SHARED}    await asyncio.sleep(1000)\n    yield 1",
        ),
        "shared resources",
        r"Broken.open_shared did not return within 1 s; it waits at FILE:21",
    ),
    "open-shared-plain": Broken(
        source(shared="@classmethod\nasync def open_shared(cls):\n    return 1"),
        "shared resources",
        r"is not an asynchronous context manager: write `@classmethod @asynccontextmanager async def open_shared",
    ),
    "open-shared-raises": Broken(
        source(
            before="import contextlib",
            shared=f"{SHARED}    open('no-such-index')\n    yield 1",
        ),
        "shared resources",
        r"FileNotFoundError: .*no-such-index' \(FILE:21\)",
    ),
    "close-raises": Broken(
        source(close="async def close(self):\n    self.file.close()"),
        "one turn",
        r"Broken.close: AttributeError: .*'file' \(FILE:19\)",
    ),
    "close-hangs": Broken(
        source(close="async def close(self):\n    import asyncio; await asyncio.sleep(1000)"),
        "one turn",
        r"Broken.close did not return within 1 s; it waits at FILE:19",
    ),
    "init-argument": Broken(
        source(init="def __init__(self, size):\n    self.size = size"),
        "one turn",
        r"missing 1 required positional argument: 'size': give the arguments in env.kwargs, or with --arg NAME=VALUE",
    ),
    "init-raises": Broken(
        source(init="def __init__(self):\n    self.size = int('ten')"),
        "one turn",
        r"Broken.__init__: ValueError: .*'ten' \(FILE:19\)",
    ),
    "demonstrations-raise": Broken(
        source(more="@classmethod\ndef demonstrations(cls, task, *, skill=1.0, seed=0):\n    return [task.script]"),
        "tokens",
        r"Broken.demonstrations of task 0: AttributeError: .*'script' \(FILE:20\)",
    ),
    "demonstrations-call-no-tool": Broken(
        source(
            before="from agentrl import ToolCall\n",
            look="async def look(self, word: str) -> str:\n    return word",
            more="@classmethod\ndef demonstrations(cls, task, *, skill=1.0, seed=0):\n"
            "    call = ToolCall(id='1', name='look', arguments={'word': 'a'})\n"
            "    return [Message(role='assistant', content='', tool_calls=(call,))]",
        ),
        "demonstrations",
        r"they call look, which is a method and no tool: write @tool above it \(FILE:\d+\)",
    ),
    "demonstrations-texts": Broken(
        source(more="@classmethod\ndef demonstrations(cls, task, *, skill=1.0, seed=0):\n    return ['25']"),
        "tokens",
        r"Broken.demonstrations gave '25' \(str\): a message is `user",
    ),
    "phrase-raises": Broken(
        source(more="@classmethod\ndef phrase(cls, answer):\n    return answer['text']"),
        "repeatable",
        r"Broken.phrase: TypeError: .* \(FILE:20\)",
    ),
    "weights-list": Broken(
        source(weights='reward_weights = ["correct"]'),
        "loading",
        r"Broken.reward_weights is \['correct'\] \(list\): write `reward_weights = \{\"correct\": 1.0\}` \(FILE:4\)",
    ),
    "weights-text": Broken(
        source(weights='reward_weights = {"correct": "1"}'), "loading", r"Broken.reward_weights is \{'correct': '1'\}"
    ),
    "max-turns-text": Broken(
        source(turns='max_turns = "8"'), "loading", r"Broken.max_turns is '8' \(str\): write a number of turns"
    ),
    "import-error": Broken(
        source(before="import no_such_module_here"),
        "loading",
        r"ModuleNotFoundError: No module named 'no_such_module_here'; is no_such_module_here installed in .*\(FILE:2\)",
    ),
    "syntax-error": Broken(source(before="def broken(:"), "loading", r"SyntaxError: .* \(FILE:2\)"),
    "import-exits": Broken(source(before="raise SystemExit('no')"), "loading", r"SystemExit: no \(FILE:2\)"),
    "other-class": Broken(
        source().replace("class Broken", "class Brocken"),
        "loading",
        r"'Broken' does not exist; did you mean 'Brocken'\?",
    ),
    "not-an-env": Broken(
        "class Broken:\n    pass\n",
        "loading",
        r"'Broken' is not an Env class: derive it from agentrl.ToolEnv or agentrl.Env.*\(FILE:1\)",
    ),
}
SOUND = {
    "tool-number": look("return len(word)"),
    "prints": look('print("looking", flush=True); return word'),
    "group-score": grouped('return [{"brief": 1.0 / len(episodes)} for _ in episodes]'),
    "plain-score": source(
        score='def score(self, episode):\n    return {"correct": float(f"{{{episode.task.answer}}}" in episode.final_text)}'
    ),
}
"""They pass."""
BLOCKING = {
    "reset-blocks": reset("import time; time.sleep(1000)"),
    "tool-sleeps": look("import time; time.sleep(1000)"),
    "import-hangs": source(before="import time; time.sleep(1000)"),
}
"""They block the event loop: a process of their own has to be ended."""
