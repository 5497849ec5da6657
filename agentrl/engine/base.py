"""The protocols of an engine: what rollouts and weight updates require of whatever generates tokens.

Independent of vLLM, HTTP and processes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from agentrl.types import Completion, Sampling, TransferInit, WeightsRef


class Engine(Protocol):
    """Token ids in; token ids, logprobs and version spans out. Raises EngineError when it cannot deliver all three.

    Example:
        completion = await engine.generate(prompt_ids, Sampling(max_tokens=64), request_id="g7-0-1")
        completion.token_ids, completion.behavior_logprobs, completion.version_spans
    """

    async def generate(
        self, token_ids: Sequence[int], sampling: Sampling, *, request_id: str, session_id: str | None = None
    ) -> Completion:
        """Continue `token_ids`. Cancelling the call aborts the request in the engine.

        `request_id` is unique in a run. Requests of one `session_id` extend each other's prompts: an engine may use it
        to find their cached prefix. None: the request belongs to no session.
        """
        ...


class TrainableEngine(Engine, Protocol):
    """An engine whose weights follow the learner's.

    Example:
        update = await engine.update_weights(ref)  # running requests continue under the new version
    """

    @property
    def wants_weights(self) -> bool:
        """Whether the learner must publish the current version again: an engine lost it, or has a part of it."""
        ...

    async def receivers(self, policy_version: int) -> Receivers:
        """Which engines the next group of the learner consists of, to publish `policy_version`. Raises EngineError."""
        ...

    async def init_transfer(self, init: TransferInit) -> None:
        """Let those of the last `receivers` join the learner's group. Raises EngineError, WeightsWanted."""
        ...

    async def pause(self) -> None:
        """Stop at the next token until the next `update_weights`. Requests wait meanwhile and go on where they were.

        Raises EngineError.
        """
        ...

    async def sleep(self) -> None:
        """Release the GPU memory of weights and KV cache until the next `update_weights`. Requests wait meanwhile.

        Raises EngineError.
        """
        ...

    async def update_weights(self, ref: WeightsRef) -> WeightUpdate:
        """Swap weights while requests run, and prove that the engine holds them.

        Raises WeightSyncError; WeightsWanted where the learner must publish them again.
        """
        ...

    def metrics(self) -> dict[str, float]:
        """Counts since the start, under `engine/*` names."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineState:
    """One engine as the run's own client knows it, for other clients that generate with it.

    Example: `EngineState(url="http://127.0.0.1:8000", model="policy", version=3, is_open=True, is_serving=True)`.
    """

    url: str
    model: str
    version: int  # of the weights that it is proven to hold, where `is_open`
    is_open: bool  # takes requests now
    is_serving: bool  # False: it is out, and its requests go elsewhere
    num_refused: int = 0  # weight updates that failed
    num_checks: int = 0  # how often the run's own client has looked at it because another client asked
    is_spare: bool = False  # it only evaluates (`eval.engines`)


class SharedEngines(Protocol):
    """Engines whose weights one client updates and with which others generate. Example: `VLLMEngine`, `EnginePool`."""

    def states(self) -> tuple[EngineState, ...]:
        """All engines, always in the same order."""
        ...

    async def check(self, index: int) -> None:
        """A request to the engine failed elsewhere: give it its weights back, or take it out, if it was restarted or is
        gone. Raises EngineError, WeightsWanted when it does not serve afterwards."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Receivers:
    """The engines that take one version from the learner's group, by name. One that must join anew has another name.

    Example: `Receivers(engines=("http://10.0.0.5:8000#0", "http://10.0.0.6:8000#2"))`. Empty: all have it already.
    """

    engines: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Parity:
    """|engine - learner| over the logprobs of one text, in nats. Example: `parity([-1.0], [-1.5]).max_abs` is 0.5."""

    max_abs: float
    mean_abs: float
    kl: float  # KL(engine || learner) per token, estimated on the text


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightUpdate:
    """Duration, size and proof of one weight update.

    >>> WeightUpdate(gap_s=0.5, num_bytes=1000, parity=None).metrics()
    {'engine/update_gap_s': 0.5, 'engine/update_bytes_per_s': 2000.0}
    """

    gap_s: float  # generation stood still
    num_bytes: int
    parity: Parity | None  # of the probe text; None where this update was not probed

    def metrics(self) -> dict[str, float]:
        """Under `engine/*` names."""
        values = {"engine/update_gap_s": self.gap_s, "engine/update_bytes_per_s": self.num_bytes / self.gap_s}
        if self.parity is not None:
            values |= {
                "engine/parity_max_abs": self.parity.max_abs,
                "engine/parity_mean_abs": self.parity.mean_abs,
                "engine/parity_kl": self.parity.kl,
            }
        return values


def is_delta(ref: WeightsRef) -> bool:
    """Whether `ref.path` has older weights, and other folders what changed since.

    >>> from agentrl.types import Probe
    >>> info, probe = {"path": "/w/v5", "deltas": ["/w/v6"]}, Probe(token_ids=(), logprobs=())
    >>> is_delta(WeightsRef(policy_version=6, num_bytes=9, update_info=info, checksum="", probe=probe))
    True
    """
    return bool(ref.update_info.get("deltas"))


def parity(engine: Sequence[float], learner: Sequence[float]) -> Parity:
    """Compare the logprobs of the same tokens. Both [T].

    The KL estimate is the mean of exp(d) - 1 - d, d = learner - engine (k3 of http://joschu.net/blog/kl-approx.html):
    unbiased where the tokens were sampled by the engine, and never negative. The learner has the same estimate for
    tensors (trainer.objective); agentrl must not import torch. A NaN makes all numbers infinite.
    Raises ValueError when the lengths differ or there is nothing to compare.

    >>> parity([-1.0, -2.0], [-1.5, -2.0]).max_abs
    0.5
    """
    if not engine or len(engine) != len(learner):
        raise ValueError(f"{len(engine)} and {len(learner)} logprobs cannot be compared")
    differences = [theirs - ours for ours, theirs in zip(engine, learner, strict=True)]
    if not all(map(math.isfinite, differences)):
        return Parity(max_abs=math.inf, mean_abs=math.inf, kl=math.inf)
    return Parity(
        max_abs=max(map(abs, differences)),
        mean_abs=math.fsum(map(abs, differences)) / len(differences),
        kl=math.fsum(_k3(difference) for difference in differences) / len(differences),
    )


def _k3(difference: float) -> float:
    """Infinite where expm1 would overflow: such an update must be refused. The metric in trainer/objective/ratios.py
    uses a lower bound, because it must stay finite and be averaged.
    """
    return math.expm1(difference) - difference if difference < 700 else math.inf
