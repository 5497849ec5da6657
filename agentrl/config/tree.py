"""The config of a run: the root of the tree and its small sections. Independent of files, processes and models."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from agentrl.config.algorithm import AlgorithmConfig
from agentrl.config.engine import EngineConfig, Port
from agentrl.config.environment import EnvConfig
from agentrl.config.evaluation import EvalConfig
from agentrl.config.learner import STREAMS_NO_WHOLE_BATCH, LearnerConfig, method_refusal
from agentrl.config.model import ModelConfig
from agentrl.config.presets import OPTIMAL, PER_EPISODE
from agentrl.config.ray import PlaceName, RayConfig, ray_refusal
from agentrl.config.rollout import RolloutConfig
from agentrl.config.section import Choices, Section
from sandbox.protocol import BACKENDS, BackendName

SinkName = Annotated[
    Literal["tensorboard", "wandb", "trackio", "mlflow"],
    Choices(
        {
            "tensorboard": "event files in RUN/tensorboard",
            "wandb": "Weights & Biases, offline in RUN/wandb unless WANDB_MODE is set",
            "trackio": "a local trackio file in RUN/trackio unless TRACKIO_DIR is set",
            "mlflow": "an SQLite file in RUN/mlflow unless MLFLOW_TRACKING_URI is set",
        }
    ),
]


class SandboxConfig(Section):
    """The service that runs model-written code. With `url` set, a running one is used.

    Example:
        >>> SandboxConfig(backend="landlock", slots=4).backend
        'landlock'
    """

    url: str | None = None
    """Address of a running service. null: one is started here."""
    host: str = "127.0.0.1"
    """Address that a service started here listens on."""
    port: Port = 0
    """0 picks a free port."""
    backend: Annotated[BackendName, Choices(BACKENDS)] = "auto"
    """What isolates the code (docs/sandbox.md)."""
    slots: PositiveInt = 8
    """Executions that run at the same time."""
    memory_bytes: PositiveInt = 512 * 1024**2
    """Memory of one session."""
    max_restarts: Annotated[int, Field(ge=0)] = 3
    """How often a service that died is restarted. Each hour without a failure adds one restart, up to this number.
    Its episodes are played again."""
    allow_unsafe: bool = False
    """Permit the backend `unsafe`, which isolates nothing: only for code that you trust."""


class TrainConfig(Section):
    """When the run ends.

    Example:
        >>> TrainConfig(steps=20, max_minutes=5).stall_timeout_s
        900.0
    """

    steps: PositiveInt = 100
    """Optimizer steps of the run."""
    max_minutes: PositiveFloat | None = None
    """Stop after this much training time. Set-up and the evaluations before and after do not count."""
    stall_timeout_s: PositiveFloat = 900.0
    """End the run with an error when nothing moves for this long: no generated text, no finished group, no step."""
    loop_stall_s: PositiveFloat = 60.0
    """End the run with an error when one piece of code blocks the event loop, and so everything else, for this long."""


class MetricsConfig(Section):
    """Where the metrics go beside `metrics.jsonl`, which always has them (docs/metrics.md), and those of tokens.

    Example:
        >>> MetricsConfig(sinks=("tensorboard", "wandb")).sinks
        ('tensorboard', 'wandb')
        >>> [step for step in range(1, 11) if MetricsConfig(annotate=0.25).annotates_tokens(step)]
        [4, 8]
    """

    sinks: tuple[SinkName, ...] = ("tensorboard",)
    """Each gets every line; one that fails never stops the run. All but tensorboard need the extra of their name."""
    annotate: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Share of the steps of which the learner's numbers of every token are written for viewers, spread evenly. Those of
    each episode are written in every step. 0: neither."""

    def annotates_tokens(self, step: int) -> bool:
        """Whether the numbers of the tokens of this step are written."""
        return math.floor(step * self.annotate) > math.floor((step - 1) * self.annotate)

    @model_validator(mode="after")
    def _names_each_once(self) -> MetricsConfig:
        if len(set(self.sinks)) < len(self.sinks):
            raise ValueError(f"metrics.sinks names one twice: {', '.join(self.sinks)}")
        return self


class Config(Section):
    """A whole run.

    Example:
        >>> config = Config(name="demo", env=EnvConfig(target="ModMath-v0"), model=ModelConfig(path="m"))
        >>> config.algorithm.preset
        'vcpo_safe'
    """

    name: str
    """Name of the run, and of its folder."""
    seed: int = 0
    """Seed of the task order, the environments and the learner."""
    out_dir: str = "runs"
    """Folder in which the run's folder is made."""
    place: PlaceName = "local"
    """Where the parts of the run are started."""
    env: EnvConfig
    model: ModelConfig
    rollout: RolloutConfig = RolloutConfig()
    engine: EngineConfig = EngineConfig()
    sandbox: SandboxConfig = SandboxConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    learner: LearnerConfig = LearnerConfig()
    eval: EvalConfig = EvalConfig()
    train: TrainConfig = TrainConfig()
    metrics: MetricsConfig = MetricsConfig()
    ray: RayConfig = RayConfig()

    @model_validator(mode="after")
    def _can_be_on_ray(self) -> Config:
        found = ray_refusal(self.ray, self.engine, self.learner)
        if self.place == "ray" and found is not None:
            raise ValueError(found)
        if self.place == "local" and self.ray != RayConfig():
            raise ValueError("the section ray is read only with place=ray: set it, or leave the section out")
        return self

    @model_validator(mode="after")
    def _checks_across_sections(self) -> Config:
        if self.algorithm.compares_members and self.rollout.group_size < 2:
            raise ValueError(
                f"algorithm.baseline={self.algorithm.baseline} and algorithm.normalize_by_std="
                f"{str(self.algorithm.normalize_by_std).lower()} need rollout.group_size >= 2; for single episodes set "
                "algorithm.preset=reinforce"
            )
        baseline = self.algorithm.baseline
        reason = method_refusal(
            self.learner.gradient,
            has_norms=baseline in OPTIMAL,
            is_exact=self.algorithm.baseline_norms == "exact",
            needs_norms_first=baseline in PER_EPISODE or self.algorithm.has_terms,
            is_divided=self.learner.sequence_parallel > 1,
        )
        if reason and self.algorithm.objective == "policy_gradient":  # a class of one's own says itself what it needs
            raise ValueError(reason)
        self._check_reference()
        if self.algorithm.credit == "turn" and self.rollout.partial == "mask":
            raise ValueError(
                "algorithm.credit=turn with rollout.partial=mask: the reward of a turn that is left out has no place. "
                "Set rollout.partial=keep"
            )
        if self.learner.warmup_steps >= self.train.steps:
            raise ValueError(
                f"learner.warmup_steps={self.learner.warmup_steps} must be below train.steps={self.train.steps}: the "
                "run would end before its learning rate is reached"
            )
        if self.rollout.max_turn_tokens >= self.rollout.max_context:
            raise ValueError(
                f"rollout.max_turn_tokens={self.rollout.max_turn_tokens} must be smaller than rollout.max_context="
                f"{self.rollout.max_context}: an episode is its prompt and all of its turns"
            )
        if self.rollout.compaction != "none" and not 0 < self.rollout.compaction_tokens < self.rollout.max_context:
            raise ValueError(
                f"rollout.compact_at_tokens={self.rollout.compaction_tokens} must be above 0 and below "
                f"rollout.max_context={self.rollout.max_context}; by itself it is rollout.max_context - "
                "rollout.max_turn_tokens - rollout.tool_output_tokens"
            )
        if self.engine.sleep_while_training and self.rollout.max_lag:
            raise ValueError(
                f"engine.sleep_while_training with rollout.max_lag={self.rollout.max_lag:g}: rollouts go on while the "
                "learner steps, and an engine that sleeps generates nothing. Set rollout.max_lag=0, or "
                "engine.sleep_while_training=false"
            )
        if self.rollout.temperature != 1.0 or self.rollout.top_p != 1.0:
            raise ValueError(
                f"rollout.temperature={self.rollout.temperature:g} and rollout.top_p={self.rollout.top_p:g} must both "
                "be 1: any other distribution biases the importance ratios; for evaluation set eval.temperature and "
                "eval.top_p"
            )
        return self

    @property
    def eval_sets(self) -> dict[str, Config]:
        """This config as each held-out set sees it, by the set's name. Without `eval.sets` there is one, named ""."""
        return {
            name: self.model_copy(update={"env": env, "eval": settings})
            for name, (env, settings) in self.eval.resolved(self.env).items()
        }

    @model_validator(mode="after")
    def _plays_all_held_out_data(self) -> Config:
        self.eval.check_data(self.env)
        return self

    @model_validator(mode="after")
    def _can_evaluate_beside(self) -> Config:
        engine, num_spare = self.engine, self.eval.engines
        if num_spare and engine.weight_transfer not in ("auto", "safetensors", "reload"):
            raise ValueError(
                f"eval.engines={num_spare} with engine.weight_transfer={engine.weight_transfer}: an engine that "
                "evaluates takes its weights from a folder. Set engine.weight_transfer=safetensors, or eval.engines=0"
            )
        started = num_spare + engine.num_started
        if num_spare and engine.gpus is not None and len(engine.gpus) < started * engine.tensor_parallel:
            raise ValueError(
                f"engine.gpus={list(engine.gpus)}: {started} engines, {num_spare} of them by eval.engines, of "
                f"engine.tensor_parallel={engine.tensor_parallel} need {started * engine.tensor_parallel}. Name more, "
                "or set eval.engines=0"
            )
        return self

    @model_validator(mode="after")
    def _has_lag_to_reduce(self) -> Config:
        floor = self.algorithm.ess_floor
        if floor is not None and not self.rollout.max_lag:
            raise ValueError(
                f"algorithm.ess_floor={floor:g} does nothing with rollout.max_lag=0: there is no lag to reduce. Leave "
                "it out, or set algorithm.refuse_below"
            )
        return self

    @model_validator(mode="after")
    def _can_stream(self) -> Config:
        if not self.learner.stream_groups:
            return self
        rollout, given = self.rollout, "learner.stream_groups with "
        if rollout.max_lag:
            raise ValueError(
                f"{given}rollout.max_lag={rollout.max_lag:g}: rollouts already go on while the learner steps. Set "
                "rollout.max_lag=0, or learner.stream_groups=false"
            )
        late = "which groups a batch has is only known once it is whole. Set"
        if rollout.oversample > 1:
            name = f"rollout.oversample={rollout.oversample:g}"
            raise ValueError(f"{given}{name}: {late} rollout.oversample=1, or learner.stream_groups=false")
        if rollout.replay is not None:
            raise ValueError(f"{given}rollout.replay: {late} rollout.replay=null, or learner.stream_groups=false")
        if self.engine.sleep_while_training:
            raise ValueError(
                f"{given}engine.sleep_while_training: the learner computes while the engine generates. Set one of "
                "them to false"
            )
        if self.algorithm.looks_at_batch and self.algorithm.objective == "policy_gradient":
            raise ValueError(STREAMS_NO_WHOLE_BATCH)
        return self

    def _check_reference(self) -> None:
        """Raises ValueError for a reference that is missing, or that nothing uses."""
        given, algorithm = self.model.reference, self.algorithm
        if given is None and algorithm.needs_reference:
            raise ValueError(
                f"algorithm.objective={algorithm.objective} with algorithm.kl_beta={algorithm.kl_beta:g} needs a "
                "frozen model to compare with: set model.reference=initial, or model.reference=PATH"
            )
        if given is not None and algorithm.needs_reference is False:
            raise ValueError(
                f"model.reference={given} does nothing: leave it out, or set algorithm.kl_beta, or "
                "algorithm.preset=distill"
            )
