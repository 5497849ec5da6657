"""The sections of a run's config as frozen records. Knows nothing of files, processes or models."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from agentrl.config.algorithm import AlgorithmConfig, Section
from agentrl.config.rollout import RolloutConfig as RolloutConfig

Port = Annotated[int, Field(ge=0, le=65535)]


class WrapperConfig(Section):
    """One wrapper around the environment: `TimeLimit: {turns: 4}`, or only a name where it needs no arguments."""

    name: str
    """One of agentrl.wrappers, or your own: `module:Class`, `path/to/file.py:Class`."""
    kwargs: dict[str, Any] = Field(default_factory=dict)

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
    """Which environment, and its rows."""

    target: str
    """`module:Class`, `path/to/file.py:Class`, or a registered id such as `AimePython-v0`."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the class's constructor, or options of the adapter that `target` names."""
    train_data: str | None = None
    """Training rows: a set's name (GSM8K), a hub name (hf:owner/name?split=train), a .jsonl or .parquet file, a folder:
    docs/math.md. None for environments that generate their own."""
    eval_data: str | None = None
    """Held-out rows, written in the same ways."""
    allow_overlap: bool = False
    """Train although training rows are in the held-out data too, word for word or nearly."""
    max_turns: PositiveInt | None = None
    """Overrides the class's own turn budget."""
    wrappers: tuple[WrapperConfig, ...] = ()
    """Laid around the environment, the first one innermost: `[{ToolBudget: {calls: 4}}, {Record: {path: e.jsonl}}]`."""


class WarmstartConfig(Section):
    """Makes a small model from the environment's scripted demonstrations when `model.path` is missing."""

    vocab_size: PositiveInt = 768
    hidden_size: PositiveInt = 128
    num_layers: PositiveInt = 4
    num_heads: PositiveInt = 4
    num_kv_heads: PositiveInt = 2
    intermediate_size: PositiveInt = 512
    demonstrations: PositiveInt = 2400
    """Scripted episodes played in the sandbox; training goes over them as often as `steps` needs."""
    steps: PositiveInt = 1200
    batch_size: PositiveInt = 8
    lr: PositiveFloat = 1.2e-3
    skill: Annotated[float, Field(gt=0, le=1)] = 0.4
    """Share of demonstrations that take the right approach: the model learns to imitate a demonstrator this good."""


class LoraConfig(Section):
    """Low-rank adapters beside frozen weights, through PEFT: y = W x + alpha / rank * B A x, A and B are trained."""

    rank: PositiveInt = 16
    alpha: PositiveInt = 32
    dropout: float = 0.0
    target_modules: Literal["all-linear"] | tuple[str, ...] = "all-linear"
    """Names of the linear layers that get an adapter, as PEFT understands them: [q_proj, v_proj]. all-linear: every
    one but the output head."""

    @model_validator(mode="after")
    def _has_no_dropout(self) -> LoraConfig:
        if self.dropout:
            raise ValueError(
                f"dropout={self.dropout:g} must be 0: the engine samples without it, so importance ratios would be of "
                "two different policies"
            )
        return self


class ModelConfig(Section):
    """The policy."""

    path: str
    """A folder in Hugging Face layout, or a hub name."""
    warmstart: WarmstartConfig | None = None
    renderer: str = "auto"
    """What writes turns as tokens: the chat `template`, `raw` text, or a family of the renderers package such as qwen3.
    auto: the package where it knows the model, else the template, else (only without one) raw text."""
    chat_template_args: dict[str, Any] = Field(default_factory=dict)
    """Variables for the chat template, such as {enable_thinking: false}."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    lora: LoraConfig | None = None
    """Train adapters instead of all weights: docs/algorithms.md, "LoRA"."""


class EngineConfig(Section):
    """vLLM. With `url` set running servers are used; otherwise `agentrl train` starts them on this machine."""

    url: str | tuple[str, ...] | None = None
    """One server, or several that serve the same model."""
    replicas: PositiveInt = 1
    """Servers to start here; each takes `tensor_parallel` GPUs of its own."""
    update_order: Literal["simultaneous", "rolling"] = "simultaneous"
    """Of several engines: new weights for all at once, or for one after the other while the rest go on generating."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    host: str = "127.0.0.1"
    port: Port = 0
    """0 picks a free port."""
    max_num_seqs: PositiveInt = 64
    kv_cache_bytes: PositiveInt = 268_435_456
    """KV cache on CPU."""
    gpu_memory_fraction: Annotated[float, Field(gt=0, le=1)] = 0.9
    """Share of a GPU's memory that vLLM takes; lower it where the learner works on the same GPU."""
    gpus: tuple[Annotated[int, Field(ge=0)], ...] | None = None
    """Which GPUs the engine uses, e.g. [0, 1]; None: those that the process sees."""
    tensor_parallel: PositiveInt = 1
    """GPUs that share one copy of the model."""
    request_seeds: bool = False
    """Each request has a seed of its own, so that an episode played again comes out as before: with max_num_seqs=1 and
    rollout.max_lag=0 to the bit. Turns off the prefix cache on a CPU. See docs/resume.md."""
    stream_interval: PositiveInt = 16
    """Tokens between two messages of a running generation: what a dying engine loses at most. 1 loses least and costs
    most."""
    weight_transfer: Literal["auto", "safetensors", "reload", "gloo", "nccl", "ipc"] = "auto"
    """How weights travel: through a folder in memory or on disk (safetensors; reload, which needs no plugin), or from
    process to process (nccl and ipc on GPUs, gloo on CPUs). auto: safetensors on CPUs, nccl on GPUs."""
    kv_on_update: Literal["stale", "recompute"] = "recompute"
    """Running requests after a weight update: keep the old KV entries, or recompute them with the new weights."""
    max_restarts: Annotated[int, Field(ge=0)] = 3
    """Times in a row that an engine which died is started again, with the present weights; its requests go on. An hour
    of good health gives one back."""
    start_timeout_s: PositiveFloat = 180.0
    request_timeout_s: PositiveFloat = 120.0
    """Longest wait for an answer, or for the next tokens of one."""
    update_timeout_s: PositiveFloat = 300.0
    """Deadline of one weight update; after it the weights of before go on."""
    parity_bound: PositiveFloat | Literal["auto"] = "auto"
    """Largest allowed |engine - learner| logprob on the probe text after an update. auto: by model.dtype, see
    docs/engine.md."""
    parity_every: PositiveInt = 1
    """Probe the first update and every n-th after it."""

    @model_validator(mode="after")
    def _several_engines_fit(self) -> EngineConfig:
        if self.url is not None and self.replicas > 1:
            raise ValueError("replicas starts servers here and url names running ones: give one of them")
        if self.url == ():
            raise ValueError("url is an empty list: name a server, or leave it out to have one started")
        if self.num_engines > 1 and self.weight_transfer in ("gloo", "nccl", "ipc"):
            raise ValueError(
                f"weight_transfer={self.weight_transfer} joins one engine to the learner: several take their weights "
                "from a folder that all can read, safetensors or reload"
            )
        needed = self.replicas * self.tensor_parallel
        if self.gpus is not None and self.replicas > 1 and len(self.gpus) < needed:
            raise ValueError(f"{self.replicas} replicas of {self.tensor_parallel} GPUs need {needed} of gpus")
        return self

    @property
    def urls(self) -> tuple[str, ...]:
        """Running servers to use; empty where they are to be started."""
        return () if self.url is None else (self.url,) if isinstance(self.url, str) else self.url

    @property
    def num_engines(self) -> int:
        """Engines of the run."""
        return len(self.urls) or self.replicas

    @property
    def max_running(self) -> int:
        """Sequences that all engines together generate at once."""
        return self.num_engines * self.max_num_seqs


class SandboxConfig(Section):
    """The service that runs model-written code. With `url` set a running one is used."""

    url: str | None = None
    host: str = "127.0.0.1"
    port: Port = 0
    backend: Literal["auto", "namespaces", "unsafe"] = "auto"
    slots: PositiveInt = 8
    """Executions that run at the same time."""
    memory_bytes: PositiveInt = 512 * 1024**2
    """Of one session."""
    max_restarts: Annotated[int, Field(ge=0)] = 3
    """Times in a row that a service which died is started again; an hour of good health gives one back. The episodes
    that were in it are played again."""
    allow_unsafe: bool = False
    """Permit backend `unsafe`, which isolates nothing: only for code that you trust."""


class LearnerConfig(Section):
    """DeepSpeed."""

    lr: PositiveFloat = 1e-6
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    grad_clip: PositiveFloat = 1.0
    zero_stage: Literal[0, 1, 2, 3] = 1
    """What DeepSpeed splits over the ranks: nothing, optimizer states, gradients too, parameters too."""
    offload_optimizer: bool = False
    """Keep the optimizer's states, and its float32 weights where the model's are not, in host memory and step there.
    Stages 1 to 3."""
    gradient_checkpointing: bool = False
    """Keep no activations and compute them again in the backward pass: less memory, a third more time."""
    pack_tokens: PositiveInt = 8192
    """Tokens of one micro-batch, in which trajectories lie side by side; a longer one has a micro-batch to itself."""
    num_ranks: PositiveInt = 1
    """Processes that share each step: one a GPU."""
    hostfile: str | None = None
    """Lines `name slots=8`, as many slots in all as num_ranks: the machines on which DeepSpeed's launcher starts them,
    this one first. None: all on this one. See docs/cluster.md."""
    num_threads: PositiveInt = 1
    """CPU threads of a rank."""
    max_restarts: Annotated[int, Field(ge=0)] = 3
    """Times in a row that a learner which died is started again, from its newest checkpoint; an hour of good health
    gives one back. No episode that was finished is lost."""
    start_timeout_s: PositiveFloat = 180.0
    step_timeout_s: PositiveFloat = 600.0
    save_every: Annotated[int, Field(ge=0)] = 50
    """Steps between exports of the weights in Hugging Face layout; the last step is always saved. 0: only the last."""
    checkpoint_every: Annotated[int, Field(ge=0)] = 20
    """Steps between checkpoints of the learner's whole state, optimizer included, from which it can go on; the steps
    after the newest are made again from the journal, with the episodes that they had. 0: none, all steps are."""
    keep_checkpoints: PositiveInt = 2
    """How many of these are kept; the oldest goes when a new one is whole."""

    @model_validator(mode="after")
    def _can_offload(self) -> LearnerConfig:
        if self.offload_optimizer and self.zero_stage == 0:
            raise ValueError(
                "offload_optimizer needs zero_stage 1, 2 or 3: in stage 0 the optimizer stays where the model is"
            )
        return self


class EvalConfig(Section):
    """Held-out measurement with the rollout's own code."""

    every: Annotated[int, Field(ge=0)] = 0
    """Steps between evaluations during training; 0 evaluates before and after only."""
    num_tasks: PositiveInt = 64
    samples_per_task: PositiveInt = 4
    """The n of avg@n."""
    temperature: PositiveFloat = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0


class TrainConfig(Section):
    """When the run ends."""

    steps: PositiveInt = 100
    max_minutes: PositiveFloat | None = None
    """Stop after this much training time, set-up and evaluations before and after not counted."""
    stall_timeout_s: PositiveFloat = 900.0
    """End the run, by name, when nothing moved for this long: no answer of the engine, no finished group, no step."""
    loop_stall_s: PositiveFloat = 60.0
    """End the run, by name, when one piece of code held the event loop, and with it everything else, for this long."""


class Config(Section):
    """A whole run."""

    name: str
    seed: int = 0
    out_dir: str = "runs"
    env: EnvConfig
    model: ModelConfig
    rollout: RolloutConfig = RolloutConfig()
    engine: EngineConfig = EngineConfig()
    sandbox: SandboxConfig = SandboxConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    learner: LearnerConfig = LearnerConfig()
    eval: EvalConfig = EvalConfig()
    train: TrainConfig = TrainConfig()

    @model_validator(mode="after")
    def _checks_across_sections(self) -> Config:
        if self.algorithm.needs_spread and self.rollout.group_size < 2:
            raise ValueError(
                f"algorithm.baseline={self.algorithm.baseline} and normalize_by_std={self.algorithm.normalize_by_std} "
                "need rollout.group_size >= 2; for single episodes set algorithm.preset: reinforce"
            )
        if self.rollout.max_turn_tokens >= self.rollout.max_context:
            raise ValueError("rollout.max_turn_tokens must be smaller than rollout.max_context")
        if self.rollout.compaction != "none" and not 0 < self.rollout.compaction_tokens < self.rollout.max_context:
            raise ValueError(
                "rollout.compact_at_tokens must be smaller than rollout.max_context; by itself it is max_context - "
                "max_turn_tokens - tool_output_tokens, which must be positive"
            )
        if self.rollout.temperature != 1.0 or self.rollout.top_p != 1.0:
            raise ValueError(
                "training samples at temperature 1 and top_p 1: any other distribution biases the importance ratios; "
                "for evaluation set eval.temperature and eval.top_p"
            )
        return self
