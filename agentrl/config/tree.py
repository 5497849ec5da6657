"""The config of a run: the root of the tree and its small sections. Independent of files, processes and models."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from agentrl.config.algorithm import AlgorithmConfig
from agentrl.config.engine import EngineConfig, Port
from agentrl.config.learner import LearnerConfig, method_refusal
from agentrl.config.presets import OPTIMAL, PER_EPISODE
from agentrl.config.rollout import RolloutConfig
from agentrl.config.section import Choices, Section
from sandbox.protocol import BACKENDS, BackendName

Renderer = Annotated[
    str,
    Choices(
        {
            "auto": "the renderers package where it knows the model, else template, else (only without one) raw",
            "template": "the model's chat template",
            "raw": "contents one after the other, as a base model reads them",
            "qwen3": "a model family of the renderers package; so is any other name",
        }
    ),
]
Dtype = Annotated[
    Literal["float32", "bfloat16"],
    Choices({"float32": "32 bits: exact on a CPU", "bfloat16": "16 bits: half the memory, for GPUs"}),
]

Reference = Annotated[
    str,
    Choices({"initial": "model.path as it is before training; with model.lora the base model, without a second copy"}),
]

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


class WrapperConfig(Section):
    """One wrapper around the environment: `TimeLimit: {turns: 4}`, or only a name where it needs no arguments.

    Example:
        >>> WrapperConfig.model_validate({"TimeLimit": {"turns": 4}}).kwargs
        {'turns': 4}
    """

    name: str
    """One of agentrl.wrappers, or your own: `module:Class`, `path/to/file.py:Class`."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments of its constructor."""

    @model_validator(mode="before")
    @classmethod
    def _from_short_form(cls, value: Any) -> Any:
        if isinstance(value, str):
            return {"name": value}
        if isinstance(value, dict) and "name" not in value and len(value) == 1:
            name, kwargs = next(iter(value.items()))
            return {"name": name, "kwargs": kwargs or {}}
        if not isinstance(value, dict) or value.keys() - {"name", "kwargs"}:
            raise ValueError("a wrapper is a name, or a name with its arguments: `TimeLimit: {turns: 4}`")
        return value


class EnvConfig(Section):
    """The environment, and the rows of data that it plays.

    Example:
        >>> EnvConfig(target="AimePython-v0", train_data="DAPO-17k").max_turns is None
        True
    """

    target: str
    """`module:Class`, `path/to/file.py:Class`, an adapter's `gymnasium:FrozenLake-v1`, or a registered id."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the class's constructor, or options of the adapter that `target` names."""
    train_data: str | None = None
    """Training rows: a set's name (GSM8K), a hub name (hf:owner/name?split=train), a .jsonl or .parquet file, a folder:
    docs/math.md. null for environments that generate their own."""
    eval_data: str | None = None
    """Held-out rows, given in the same ways."""
    allow_overlap: bool = False
    """Train even where training rows are in the held-out data too, word for word or nearly."""
    max_turns: PositiveInt | None = None
    """Turns of an episode. null: the environment's own number."""
    wrappers: tuple[WrapperConfig, ...] = ()
    """Wrappers around the environment, the innermost first: `[{ToolBudget: {calls: 4}}, {TimeLimit: {turns: 6}}]`."""


class WarmstartConfig(Section):
    """Makes a small model from the environment's scripted demonstrations when `model.path` does not exist.

    Example:
        >>> WarmstartConfig(steps=200).vocab_size
        768
    """

    vocab_size: PositiveInt = 768
    """Tokens of the byte-pair vocabulary, which is learned from the demonstrations."""
    hidden_size: PositiveInt = 128
    """Width of the model."""
    num_layers: PositiveInt = 4
    """Transformer layers."""
    num_heads: PositiveInt = 4
    """Attention heads of a layer."""
    num_kv_heads: PositiveInt = 2
    """Key and value heads of a layer."""
    intermediate_size: PositiveInt = 128
    """Width of a layer's MLP."""
    demonstrations: PositiveInt = 2400
    """Scripted episodes played in the sandbox. Training repeats them as often as `steps` needs."""
    steps: PositiveInt = 1000
    """Optimizer steps of the supervised training."""
    batch_size: PositiveInt = 8
    """Demonstrations in one of these steps."""
    lr: PositiveFloat = 1.2e-3
    """Highest learning rate of the supervised training: AdamW's. Muon, for the layers' matrices, takes 16 times it."""
    skill: Annotated[float, Field(gt=0, le=1)] = 0.4
    """Share of demonstrations that take the right approach: the model learns to imitate a demonstrator this good."""


class LoraConfig(Section):
    """Low-rank adapters beside frozen weights, through PEFT: y = W x + alpha / rank * B A x. A and B are trained.

    Example:
        >>> LoraConfig(rank=8).target_modules
        'all-linear'
    """

    rank: PositiveInt = 16
    """Rank of B A."""
    alpha: PositiveInt = 32
    """Scale of the adapters, times rank."""
    dropout: float = 0.0
    """Must be 0: the engine samples without it."""
    target_modules: Literal["all-linear"] | tuple[str, ...] = "all-linear"
    """Names of the linear layers that get an adapter, as PEFT understands them: [q_proj, v_proj]. all-linear: all
    except the output head."""

    @model_validator(mode="after")
    def _has_no_dropout(self) -> LoraConfig:
        if self.dropout:
            raise ValueError(
                f"dropout={self.dropout:g} must be 0: the engine samples without it, so importance ratios would be of "
                "two different policies"
            )
        return self


class ModelConfig(Section):
    """The policy.

    Example:
        >>> ModelConfig(path="Qwen/Qwen3-1.7B", dtype="bfloat16").renderer
        'auto'
    """

    path: str
    """A folder in Hugging Face layout, or a hub name."""
    warmstart: WarmstartConfig | None = None
    """How to make the model when `path` does not exist; `{}` takes the defaults. null: it must exist."""
    renderer: Renderer = "auto"
    """What writes turns as tokens (docs/tokens.md)."""
    chat_template_args: dict[str, Any] = Field(default_factory=dict)
    """Variables for the chat template, such as {enable_thinking: false}."""
    dtype: Dtype = "float32"
    """Number format of the weights, in engine and learner."""
    lora: LoraConfig | None = None
    """Train adapters instead of all weights (docs/algorithms.md, "LoRA"). null: all weights."""
    reference: Reference | None = None
    """Frozen second model that scores the policy's tokens, a reference policy or a teacher: a folder or hub name of the
    same vocabulary, or `initial`. docs/teacher.md. null: none."""


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


class EvalConfig(Section):
    """Evaluation on held-out tasks, with the code that plays training episodes.

    Example:
        >>> EvalConfig(every=20, samples_per_task=16).num_tasks
        64
    """

    every: Annotated[int, Field(ge=0)] = 0
    """Steps between evaluations during training. 0: only before and after."""
    num_tasks: PositiveInt = 64
    """How many tasks of the test split are evaluated, from its first."""
    samples_per_task: PositiveInt = 4
    """The n of avg@n."""
    temperature: PositiveFloat = 1.0
    """Sampling temperature of evaluations."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus sampling of evaluations: 1 samples from all tokens."""


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
    """Where the metrics go beside `metrics.jsonl`, which always has them (docs/metrics.md).

    Example:
        >>> MetricsConfig(sinks=("tensorboard", "wandb")).sinks
        ('tensorboard', 'wandb')
    """

    sinks: tuple[SinkName, ...] = ("tensorboard",)
    """Each gets every line; one that fails never stops the run. All but tensorboard need the extra of their name."""

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

    @model_validator(mode="after")
    def _has_lag_to_reduce(self) -> Config:
        floor = self.algorithm.ess_floor
        if floor is not None and not self.rollout.max_lag:
            raise ValueError(
                f"algorithm.ess_floor={floor:g} does nothing with rollout.max_lag=0: there is no lag to reduce. Leave "
                "it out, or set algorithm.refuse_below"
            )
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
