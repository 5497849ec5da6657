"""A small environment made of the classes of `verifiers`, for the interpreter that has the package."""

import verifiers as vf
from datasets import Dataset


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: one of them
        b: the other one
    """
    return a + b


def correct(completion, answer, **kwargs) -> float:
    """Whether the last message is the answer; fails for one row, as a judge without a key would."""
    if answer == "broken":
        raise RuntimeError("the judge has no key")
    return float(completion[-1]["content"].strip() == answer)


def length(completion, **kwargs) -> float:
    """Messages of the rollout."""
    return float(len(completion))


def together(completions, **kwargs) -> list[float]:
    """Scores a group."""
    return [0.0 for _ in completions]


class Dialogue(vf.ToolEnv):
    """Has a tool, asks once more, then ends."""

    async def no_tools_called(self, state) -> bool:
        """No stop condition here: an answer without a call is answered."""
        return False

    @vf.stop
    async def enough(self, state) -> bool:
        """After two answers without a call."""
        said = [step["completion"][-1] for step in state["trajectory"]]
        return sum(not message.tool_calls for message in said) >= 2

    async def env_response(self, messages, state, **kwargs):
        """The tool's answer, or a question."""
        if messages[-1].tool_calls:
            return await super().env_response(messages, state, **kwargs)
        if messages[-1].content == "crash":
            raise vf.InfraError("its sandbox is gone")
        return [{"role": "user", "content": f"Twice {messages[-1].content}?"}]


def load_environment(grouped: bool = False):
    """The environment; `grouped` scores all rollouts of a row together."""
    rows = [{"question": f"Twice {n}?", "answer": str(2 * n)} for n in range(3)]
    return Dialogue(
        dataset=Dataset.from_list([*rows, {"question": "Judged?", "answer": "broken"}]),
        eval_dataset=Dataset.from_list(rows[:2]),
        rubric=vf.Rubric(funcs=[together if grouped else correct, length], weights=[1.0, 0.0]),
        system_prompt="Double it.",
        tools=[add],
        max_turns=6,
    )
