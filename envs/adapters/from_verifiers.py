"""A chat environment of the `verifiers` package as an AgentEnv: a worker process in its own interpreter plays it.

The worker's model is our chat endpoint, so tokens and logprobs are recorded as they were sampled. The worker scores; a
rubric that fails is EnvError and never a reward of 0.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, ClassVar

from agentrl.env import Episode, Split
from agentrl.env.agent_env import AgentEnv, Endpoint
from agentrl.errors import ConfigError, EnvError
from agentrl.types import Task
from envs.adapters.line_process import LineProcess
from envs.adapters.schema_tool import asked

log = logging.getLogger(__name__)
WORKER = Path(__file__).with_name("verifiers_worker.py")


class _Workers:
    """The process that serves the episodes of this process. It is restarted when it was lost."""

    def __init__(self, name: str, command: Sequence[str], load: Mapping[str, Any]) -> None:
        self._name = name
        self._command = command
        self._load = load
        self._gate = asyncio.Lock()
        self._process: LineProcess | None = None

    async def process(self) -> LineProcess:
        """A worker that has loaded the environment. Raises EnvError."""
        async with self._gate:
            if self._process is not None and not self._process.is_open:
                log.warning("%s was lost; restarting it", self._name)
                await self.close()
            if self._process is None:
                self._process, _ = await _loaded(self._name, self._command, self._load)
            return self._process

    async def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None:
            await process.close()


class VerifiersEnv(AgentEnv):
    """One rollout of a `verifiers` environment. `from_verifiers` makes the classes to use.

    `reward` is the rubric's. The value of each of its functions is recorded under the function's name.
    """

    name: ClassVar[str]
    command: ClassVar[Sequence[str]]
    load: ClassVar[Mapping[str, Any]]
    sampling: ClassVar[Mapping[str, Any]]
    rows: ClassVar[Mapping[str, Sequence[Mapping[str, Any]]]]
    reward_weights: ClassVar[Mapping[str, float]] = {"reward": 1.0}
    _result: Mapping[str, Any] | None = None

    @classmethod
    @asynccontextmanager
    async def open_shared(cls) -> AsyncIterator[_Workers]:
        """The worker process."""
        workers = _Workers(cls.name, cls.command, cls.load)
        try:
            await workers.process()
            yield workers
        finally:
            await workers.close()

    @classmethod
    def tasks(cls, split: Split, *, data: str | None = None, seed: int = 0) -> Iterable[Task]:
        """The rows of its own data sets: the training set and, for `test`, its evaluation set."""
        if data is not None:
            raise ConfigError(f"{cls.name} has its own rows: remove the data file {data}")
        for index, row in enumerate(cls.rows["train" if split == "train" else "eval"]):
            yield Task(id=f"{split}-{index}", prompt=row["prompt"], answer=row["answer"], metadata={"index": index})

    async def run(self, *, task: Task, endpoint: Endpoint) -> None:
        """Play and score one rollout. Raises EnvError for failures that the model did not cause."""
        worker = await self.shared.process()
        self._result = await worker.ask(
            "rollout",
            split="train" if task.id.startswith("train-") else "eval",
            index=task.metadata["index"],
            base_url=endpoint.base_url,
            api_key=endpoint.api_key,
            model=endpoint.model,
            sampling=dict(self.sampling),
        )
        assert self._result is not None
        if failed := self._result["rubric_errors"]:
            raise EnvError(f"{self.name}: its rubric failed: {'; '.join(failed)}")
        if self._result["error"] is not None:
            raise EnvError(f"{self.name}: {self._result['error']}")

    async def score(self, episode: Episode) -> dict[str, float]:
        """Returns the rubric's rewards."""
        if self._result is None or self._result["reward"] is None or self._result["rubric_errors"]:
            raise EnvError(f"{self.name} gave the rollout of task {episode.task.id} no reward")
        metrics = dict(self._result["metrics"])
        self.reward_weights = {**dict.fromkeys(metrics, 0.0), "reward": 1.0}  # type: ignore[misc]
        return {**metrics, "reward": float(self._result["reward"])}


def from_verifiers(
    env_id: str,
    *,
    python: str,
    args: Mapping[str, Any] | None = None,
    paths: Sequence[str] = (),
    sampling: Mapping[str, Any] | None = None,
    max_turns: int = 64,
) -> type[VerifiersEnv]:
    """Makes an AgentEnv class from the environment that `verifiers.load_environment(env_id, **args)` returns.

    Args:
        env_id: id in `verifiers`: the name of an installed module, or of one in `paths`.
        python: interpreter of the virtual environment that has `verifiers` (0.1.10 to 0.3.1) and the environment.
        args: arguments of its `load_environment`.
        paths: folders to import from, for an environment that is not installed.
        sampling: `max_tokens` and `stop` of its calls; the run determines the other settings.
        max_turns: limit on the model's answers in an episode.

    Raises ConfigError: it cannot be loaded, scores groups together, or has no rows.

    Example:
        Hard = from_verifiers("my-environment", python="~/verifiers/bin/python", args={"difficulty": "hard"})
    """
    interpreter = Path(python).expanduser().absolute()
    if not interpreter.is_file():
        raise ConfigError(
            f"verifiers:{env_id}: python={python!r} does not exist; make it with `python3 -m venv FOLDER` and "
            "`FOLDER/bin/pip install verifiers==0.3.1`, and give FOLDER/bin/python"
        )
    name = f"verifiers:{env_id}"
    command = [str(interpreter), str(WORKER)]
    load = {"env_id": env_id, "args": dict(args or {}), "paths": [str(Path(p).expanduser().absolute()) for p in paths]}
    rows = asked(lambda: _ask_for_rows(name, command, load))
    if not rows["train"] and not rows["eval"]:
        raise ConfigError(f"{name} has no rows")
    fields = {
        "__doc__": f"{env_id} of the verifiers package.",
        "__module__": __name__,
        "name": name,
        "command": command,
        "load": load,
        "sampling": dict(sampling or {}),
        "rows": rows,
        "max_turns": max_turns,
    }
    return type(env_id.replace("/", "_"), (VerifiersEnv,), fields)


async def _ask_for_rows(name: str, command: Sequence[str], load: Mapping[str, Any]) -> Any:
    process, rows = await _loaded(name, command, load)
    await process.close()
    return rows


async def _loaded(name: str, command: Sequence[str], load: Mapping[str, Any]) -> tuple[LineProcess, Any]:
    # The endpoint is on this machine, so no web proxy may be used for it.
    no_proxy = {"NO_PROXY": "127.0.0.1,localhost", "no_proxy": "127.0.0.1,localhost"}
    process = await LineProcess.open(name, command, env=no_proxy)
    try:
        return process, await process.ask("load", **load)
    except BaseException:
        await process.close()
        raise
