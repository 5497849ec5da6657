"""`agentrl doctor CONFIG --deep`: train one step with the config, in a temporary folder, and judge its numbers.

The run is that of `agentrl train`, with few episodes of a trivial environment: it shows whether the engine takes the
learner's weights, whether both compute the same logprobs, and what their rounding costs in sequence weights. Nothing
is kept, except the logs of a failure.
"""

from __future__ import annotations

import asyncio
import math
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import count, islice
from pathlib import Path
from random import Random
from typing import Any, ClassVar

from agentrl.cli.doctor.findings import Finding, crashed, fail, ok, warn
from agentrl.config import Config
from agentrl.engine import vllm_command
from agentrl.engine.base import WeightUpdate
from agentrl.engine.parity import LogRatio, ParityBounds, log_ratio_at, mean_bound
from agentrl.engine.placement import Device
from agentrl.engine.vllm_server import start_timeout_s
from agentrl.env import Action, Env, Episode, Split, StepResult
from agentrl.errors import AgentRLError, ConfigError, WeightSyncError
from agentrl.report.observer import Observer, StepReport
from agentrl.run_folder import RunFolder
from agentrl.supervision.secrets import Secrets
from agentrl.supervision.status import read_status
from agentrl.training.model_folder import is_model_folder
from agentrl.training.run import Training
from agentrl.types import Message, StepOutput, Task, user

STEP, SYNC, PARITY, SUMS = "one-step train", "weight sync", "logprob parity", "summed log-ratio"
WARMSTART = {"demonstrations": 32, "steps": 1}
"""Enough for a model of the config's shape; its skill does not matter here."""
TURN_TOKENS: dict[Device, int] = {"cpu": 512, "cuda": 4096}
"""Of each episode: log-ratios are summed over as many. A CPU takes minutes for more."""
LENGTHS = (256, 1024, 4096)
LOW_RHO = 0.5
GROUP_SIZE = 4
NUM_TASKS = 64
PROMPT = "Tell a long story, of at least three thousand words, about the number {}."
SLACK_S = 120.0
SYNC_FIX = 'docs/engine.md, "Weights in flight"; engine.weight_transfer=reload needs no plugin in the server'
PARITY_FIX = 'docs/engine.md, "Parity": the same model files and model.dtype on both sides, and vLLM as pinned'
SUMS_FIX = (
    "shorter answers (rollout.max_turn_tokens, rollout.max_context), model.dtype=float32, or ratios that are not "
    'summed (algorithm.ratio=geometric_mean, or algorithm.preset=cispo): docs/engine.md, "Parity"'
)
STEP_FIX = "algorithm.refuse_below may be too strict, or the model's numbers are not finite: see learner.log"


class TellAStory(Env):
    """The trial's environment: one long turn with a random reward, so that groups carry signal whatever the model
    says. A story has the entropy of free text; what is certain, such as counting, hardly shows rounding.

    Example:
        env = TellAStory()
        messages, _ = await env.reset(task=next(iter(TellAStory.tasks("train"))))
    """

    max_turns = 1
    reward_weights: ClassVar[Mapping[str, float]] = {"luck": 1.0}

    @classmethod
    def tasks(cls, split: Split, *, data: str | None = None, seed: int = 0) -> Iterable[Task]:
        """Endless for `train`, NUM_TASKS others for `test`."""
        numbers = islice(count(), NUM_TASKS) if split == "test" else count(NUM_TASKS)
        return (Task(id=f"story-{number}", prompt=PROMPT.format(number)) for number in numbers)

    async def reset(self, *, task: Task, seed: int | None = None) -> tuple[list[Message], dict[str, Any]]:
        """See Env.reset."""
        return [user(task.prompt)], {}

    async def step(self, action: Action) -> StepResult:
        """See Env.step."""
        return StepResult([], 0.0, True, False, {})

    async def score(self, episode: Episode) -> dict[str, float]:
        """See Env.score. Here, not in `step`: a model that never ends its turn has signal too."""
        return {"luck": float(Random().random() < 0.5)}

    @classmethod
    def demonstrations(cls, task: Task, *, skill: float = 1.0, seed: int = 0) -> Sequence[Message]:
        """See Env.demonstrations."""
        return [Message(role="assistant", content=f"Once upon a time. {task.prompt}")]


async def one_step_train(
    config: Config, *, secrets: Secrets | None = None, say: Callable[[str], None] = lambda text: None
) -> list[Finding]:
    """Train one step and compare engine and learner. `say` is called with each phase. A failure is a finding too."""
    if config.engine.urls:
        found = "not tried: it changes the weights of engine.url, and a run may be using them"
        return [warn(STEP, found, "ask where the engine runs: `agentrl doctor CONFIG engine.url=null --deep`")]
    folder = Path(tempfile.mkdtemp(prefix="agentrl-doctor-"))
    trial = _trial_config(config, folder)
    run = RunFolder.create(folder, "trial", config=trial)
    observer, started, deadline_s = _Trial(say), time.monotonic(), _deadline_s(trial)
    try:
        async with asyncio.timeout(deadline_s) as deadline:
            await Training(trial, observer, secrets=secrets).run(run)
    except _StepMade as made:
        findings = judged(made.report, trial, seconds=time.monotonic() - started)
    except Exception as error:  # whatever it is: a finding, and the logs stay
        late = isinstance(error, TimeoutError) and deadline.expired()
        return [_failed(run, AgentRLError(f"not done within {deadline_s:g} s") if late else error)]
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    shutil.rmtree(folder, ignore_errors=True)
    return findings


def judged(report: StepReport, config: Config, *, seconds: float) -> list[Finding]:
    """The findings from the report on the step."""
    bounds = ParityBounds(mean_bound(config))
    numbers = [parity(report, bounds), summed_log_ratio(report.output, config)]
    return [_step(report.output, seconds), _sync(report.update, config), *numbers]


def parity(report: StepReport, bounds: ParityBounds) -> Finding:
    """Compares the logprobs of the probe text under the new weights, and those of the tokens that the engine
    sampled."""
    if report.update is None or report.update.parity is None:
        return fail(PARITY, "the engine's update was not probed", PARITY_FIX)
    probe, output = report.update.parity, report.output
    largest = math.inf if output.parity_max_abs is None else output.parity_max_abs
    mean = math.inf if output.parity_mean_abs is None else output.parity_mean_abs
    found = (
        f"|engine - learner| is {probe.mean_abs:.1e} nats on average on the probe (largest {probe.max_abs:.1e}, KL "
        f"{probe.kl:.1e}) and {mean:.1e} on sampled tokens (largest {largest:.1e}); {bounds.mean:g} on average, and a "
        f"KL of {bounds.kl:.2g}, is allowed"
    )
    if bounds.refuses(probe):
        return fail(PARITY, found, PARITY_FIX)
    is_usual = not bounds.warns(probe) and mean <= bounds.mean and largest <= bounds.largest
    return ok(PARITY, found) if is_usual else warn(PARITY, found, PARITY_FIX)


def summed_log_ratio(output: StepOutput, config: Config) -> Finding:
    """What rounding alone does to sequence weights: the spread of log w on-policy, and the ESS ratio that it leaves."""
    at_lengths = [one for one in (log_ratio_at(length, output.parity_sigmas) for length in LENGTHS) if one]
    if not at_lengths:
        return warn(SUMS, "no sampled token was scored under the weights that sampled it", PARITY_FIX)
    found = "sigma of log w without any staleness, and the ESS ratio that it leaves: " + "; ".join(
        f"{one.sigma:.2g} and {one.rho:.2g} at {one.length} tokens ({_source(one, output)})" for one in at_lengths
    )
    within = [one for one in at_lengths if one.length <= config.rollout.max_context] or at_lengths[:1]
    if within[-1].rho >= LOW_RHO:
        return ok(SUMS, found)
    if config.algorithm.ratio != "sequence":
        return ok(SUMS, f"{found}. algorithm.ratio={config.algorithm.ratio} does not sum them")
    return warn(SUMS, found, SUMS_FIX)


def _source(one: LogRatio, output: StepOutput) -> str:
    if not one.is_measured:
        return "extrapolated"
    return f"measured on {next(sums.num_sums for sums in output.parity_sigmas if sums.length == one.length)}"


def _step(output: StepOutput, seconds: float) -> Finding:
    if output.skipped:
        return warn(STEP, "the step was refused, and the weights kept", STEP_FIX)
    return ok(STEP, f"sandbox, engine and learner started, and a step made, in {seconds:.0f} s")


def _sync(update: WeightUpdate | None, config: Config) -> Finding:
    """The engine has proven both updates: the version, and the checksum where there is one."""
    way = vllm_command.placement_of(config).transfer
    if update is None:
        return fail(SYNC, f"no update by {way} was measured", SYNC_FIX)
    size, gap = f"{update.num_bytes / 1e6:.4g} MB", f"{update.gap_s:.2f} s"
    found = f"versions 0 and 1 taken by {way}, {size}, generation paused for {gap}"
    if way == "reload":
        return warn(SYNC, f"{found}; {way} has no checksum", "engine.weight_transfer=safetensors has one")
    return ok(SYNC, f"{found}; one checksum on both sides")


def _failed(run: RunFolder, error: Exception) -> Finding:
    """The finding of the error that ended the trial."""
    is_sync = isinstance(error, WeightSyncError)
    name, hint = (SYNC, f"; {SYNC_FIX}") if is_sync else (STEP, "")
    try:
        phase = f"{read_status(run.path).progress.phase}: "
    except ConfigError:  # it failed before the run began
        phase = ""
    return fail(name, phase + crashed(name, error).found, f"do what the reason says{hint}; the logs are in {run.logs}")


class _StepMade(Exception):
    """The trial's step is made: the run ends here, without the last evaluation and the export."""

    def __init__(self, report: StepReport) -> None:
        super().__init__("the step was made")
        self.report = report


class _Trial(Observer):
    """Says the phases; ends the run with the report on the first step."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say

    def phase_started(self, name: str) -> None:
        """See Observer."""
        self._say(name)

    def evaluating(self, done: int, total: int) -> None:
        """See Observer."""
        self._say("training one step")

    def step(self, report: StepReport) -> None:
        """See Observer."""
        raise _StepMade(report)


def _trial_config(config: Config, folder: Path) -> Config:
    """One step on one small group, each update probed, nothing restarted; files in `folder`."""
    room = config.rollout.max_context * 3 // 4  # the prompt has the rest
    changes: dict[str, dict[str, Any]] = {
        "env": {"target": f"{__name__}:{TellAStory.__name__}", "kwargs": {}, "train_data": None, "eval_data": None}
        | {"max_turns": None, "wrappers": ()},
        "rollout": {"groups_per_step": 1, "group_size": GROUP_SIZE, "canary_every": 0}
        | {"max_turn_tokens": max(1, min(TURN_TOKENS[vllm_command.device_of(config.engine)], room))},
        "engine": {"parity_every": 1, "max_restarts": 0},
        "learner": {"checkpoint_every": 0, "save_every": 0, "max_restarts": 0},
        "sandbox": {"max_restarts": 0},
        "eval": {"num_tasks": 1, "samples_per_task": 1, "sets": {}},
        "train": {"steps": 1, "max_minutes": None},
    }
    if config.model.warmstart is not None and not is_model_folder(Path(config.model.path)):
        warmstart = config.model.warmstart.model_copy(update=WARMSTART)
        changes["model"] = {"path": str(folder / "model"), "warmstart": warmstart}
    sections = {name: getattr(config, name).model_copy(update=keys) for name, keys in changes.items()}
    return config.model_copy(update={**sections, "out_dir": str(folder)})


def _deadline_s(config: Config) -> float:
    """The time that a run allows its parts, one after the other."""
    engine, learner = config.engine, config.learner
    updates_s = 2 * engine.update_timeout_s + engine.request_timeout_s
    return SLACK_S + start_timeout_s(engine) + learner.start_timeout_s + learner.step_timeout_s + updates_s
