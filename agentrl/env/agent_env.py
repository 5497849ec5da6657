"""`AgentEnv`: an environment whose episode is played by an agent with its own loop, over OpenAI's chat completions.

Defines where the agent finds its model; independent of tokens, recordings and engines.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from abc import abstractmethod
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from agentrl.env import Action, Env, StepResult
from agentrl.errors import EnvError
from agentrl.supervision.child import child
from agentrl.types import Message, Task

MAX_OUTPUT_BYTES = 1024**2
_IN_FOLDER = 'cd "$1" && shift && exec "$@" >"$0"'


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Where an agent finds its model, for the length of one episode.

    Example:
        OpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key).chat.completions.create(model=endpoint.model, ...)
    """

    base_url: str
    api_key: str = field(repr=False)
    model: str

    def variables(self) -> dict[str, str]:
        """Environment variables that configure OpenAI's clients, without a web proxy for this machine."""
        no_proxy = ",".join(filter(None, (os.environ.get("NO_PROXY"), "127.0.0.1,localhost")))
        return {
            "OPENAI_BASE_URL": self.base_url,
            "OPENAI_API_BASE": self.base_url,  # read by older clients
            "OPENAI_API_KEY": self.api_key,
            "OPENAI_MODEL": self.model,
            "NO_PROXY": no_proxy,
            "no_proxy": no_proxy,
        }


class AgentEnv(Env):
    """One episode of an agent that brings its own loop, tools and prompts. Override `run` and `score`.

    `run` is `async def`, or a plain function, which then runs in a thread of its own. An exception from it is a failure
    of the environment: the episode is played again and never scored. So `run` must catch what the model can cause.

        class Solver(AgentEnv):
            async def run(self, *, task, endpoint):
                self.said = await run_command(["python", "agent.py", task.prompt], endpoint=endpoint)

            async def score(self, episode):
                return {"correct": float(task_is_solved(self.said))}
    """

    max_turns: ClassVar[int] = 64
    """Answers the agent may get from the model in an episode; further calls are refused."""

    @abstractmethod
    def run(self, *, task: Task, endpoint: Endpoint) -> Awaitable[None] | None:
        """Let the agent work on the task until it is done. Keep on `self` what `score` needs."""

    async def reset(self, *, task: Task, seed: int | None = None) -> tuple[list[Message], dict[str, Any]]:
        """Not used: the agent writes its own messages."""
        raise EnvError(f"{type(self).__name__} is played through run(), by its own agent")

    async def step(self, action: Action) -> StepResult:
        """Not used: the agent answers the model itself."""
        raise EnvError(f"{type(self).__name__} is played through run(), by its own agent")


async def run_command(
    command: Sequence[str],
    *,
    endpoint: Endpoint,
    env: Mapping[str, str] | None = None,
    cwd: str | Path | None = None,
) -> str:
    """Run an agent program, in any language, to its end; returns its standard output, the last MAX_OUTPUT_BYTES of it.

    It finds its model by the variables of `Endpoint.variables`, in addition to this process's own and `env`. Its whole
    process group is killed when this returns, raises or is cancelled, and when this process dies.

    Args:
        cwd: folder to run in; None is the current one.

    Raises:
        EnvError: it could not be started, or its exit code is not 0; the end of standard error is quoted.
    """
    with tempfile.TemporaryDirectory(prefix="agentrl-agent-") as folder:
        output, errors = Path(folder, "stdout"), Path(folder, "stderr")
        in_folder = ["/bin/sh", "-c", _IN_FOLDER, str(output), str(cwd or os.getcwd()), *command]
        async with child("agent", in_folder, log_path=errors, env={**endpoint.variables(), **(env or {})}) as agent:
            code = await agent.wait()
            if code != 0:
                raise EnvError(f"{command[0]} ended with exit code {code}; standard error:\n{agent.log_tail()}")
        return await asyncio.to_thread(_end_of, output)


def _end_of(path: Path) -> str:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - MAX_OUTPUT_BYTES))
        return file.read().decode(errors="replace")
