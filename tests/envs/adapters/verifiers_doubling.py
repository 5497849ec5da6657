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
    """Whether the last message is the answer."""
    return float(completion[-1]["content"].strip() == answer)


def length(completion, **kwargs) -> float:
    """Messages of the rollout."""
    return float(len(completion))


def broken(completion, **kwargs) -> float:
    """Fails where the judge's key is missing, say."""
    raise RuntimeError("the judge has no key")


def together(completions, **kwargs) -> list[float]:
    """Scores a group."""
    return [0.0 for _ in completions]


class Dialogue(vf.MultiTurnEnv):
    """Asks once more, then ends."""

    @vf.stop
    async def enough(self, state) -> bool:
        return len(state["trajectory"]) >= 2

    async def env_response(self, messages, state, **kwargs):
        if messages[-1].content == "crash":
            raise vf.InfraError("its sandbox is gone")
        return [{"role": "user", "content": f"Twice {messages[-1].content}?"}]


def load_environment(kind: str = "dialogue", rubric: str = "correct", num_rows: int = 3):
    """The environment; `rubric` names its reward function."""
    rows = [{"question": f"Twice {n}?", "answer": str(2 * n)} for n in range(num_rows)]
    functions = {"correct": correct, "broken": broken, "together": together}
    rules = {
        "dataset": Dataset.from_list(rows),
        "eval_dataset": Dataset.from_list(rows[:2]),
        "rubric": vf.Rubric(funcs=[functions[rubric], length], weights=[1.0, 0.0]),
        "system_prompt": "Double it.",
    }
    if kind == "dialogue":
        return Dialogue(**rules)
    return vf.ToolEnv(tools=[add], max_turns=4, **rules)
