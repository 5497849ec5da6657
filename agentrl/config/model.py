"""The `model` section: the policy, its adapters, and how a small one is made. Independent of any other section."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from agentrl.config.section import Choices, Section

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
