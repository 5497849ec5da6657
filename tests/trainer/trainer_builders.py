"""Episodes made by hand or sampled from a model, and configs, for the learner's tests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from agentrl.config import Config, parse
from agentrl.testing import completion, group, trajectory
from agentrl.types import (
    Batch,
    Trajectory,
    TrajectoryGroup,
    Turn,
)

VOCAB = 300


def plain_logprobs(model: Any, ids: Sequence[int]) -> torch.Tensor:
    """log p(ids[t] | ids[:t]) for t >= 1 from the whole model's own logits. [T-1]"""
    logits_TV = model(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0]
    logits_TV = logits_TV.to(torch.promote_types(logits_TV.dtype, torch.float32))
    return logits_TV[:-1].log_softmax(-1).gather(1, torch.tensor(list(ids))[1:, None])[:, 0]


def action_logprobs(model: Any, one: Trajectory) -> torch.Tensor:
    """The same for action tokens only. [N]"""
    positions = [t - 1 for t, acted in enumerate(one.action_mask()) if acted]
    return plain_logprobs(model, one.token_ids())[positions]


ARCHITECTURES = ["Qwen3", "Qwen3-tied", "Qwen2", "Qwen2-tied", "Llama", "Llama-tied"]


def architecture(name: str) -> Any:
    """A random 2-layer model of that class. Every weight, scales and biases too, differs from its initial value."""
    import transformers

    family, _, tied = name.partition("-")
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    extra = {"head_dim": 16} if family == "Qwen3" else {}
    settings = getattr(transformers, f"{family}Config")(
        vocab_size=VOCAB, num_key_value_heads=2, tie_word_embeddings=bool(tied), pad_token_id=0, **shape, **extra
    )
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(settings).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


def uneven_episodes() -> list[Trajectory]:
    """Episodes of several turns, of a single action token, a long one, and one that contains the padding id."""
    shapes = [((6, 4), (5, 3)), ((9, 1),), ((3, 12), (2, 2)), ((40, 50),)]
    episodes = [episode(str(i), reward=1.0, seed=i, shape=shape) for i, shape in enumerate(shapes)]
    padded = Turn(observation_ids=(5, 0, 0, 6), completion=completion((9, 0, 3), (-1.0,) * 3, 0))
    return [*episodes, trajectory("padded", [padded], reward=1.0)]


def episode(
    name: str,
    *,
    reward: float,
    shape: Sequence[tuple[int, int]] = ((6, 4), (5, 3)),
    seed: int = 0,
    model: Any = None,
    off_policy: float = 0.0,
    version: int = 0,
) -> Trajectory:
    """Random tokens, `shape` = (observation, action) lengths per turn.

    With a model the behaviour logprobs are its own plus `off_policy` times noise; without, all are -6.
    """
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCAB, (sum(o + a for o, a in shape),), generator=generator).tolist()
    logprobs = [-6.0] * len(ids)
    if model is not None:
        with torch.no_grad():
            scored_T = plain_logprobs(model, ids)
        noise_T = torch.randn(len(scored_T), generator=generator) * off_policy
        logprobs = [0.0, *(scored_T + noise_T).clamp(max=-1e-4).tolist()]
    turns, at = [], 0
    for num_observed, num_acted in shape:
        split, end = at + num_observed, at + num_observed + num_acted
        turns.append(
            Turn(
                observation_ids=tuple(ids[at:split]),
                completion=completion(ids[split:end], logprobs[split:end], version),
            )
        )
        at = end
    return trajectory(name, turns, reward=reward)


def mixed_groups(model: Any, *, off_policy: float = 0.1, version: int = 0) -> list[TrajectoryGroup]:
    """Three groups of uneven lengths: two with mixed rewards, one where all rewards are equal."""
    shapes = [((6, 4), (5, 3)), ((9, 1),), ((3, 12), (2, 2), (4, 6)), ((7, 5),)]
    rewards = [(1.0, 0.0, 0.0, 1.0), (0.0, 0.25, 1.0, 0.0), (1.0, 1.0, 1.0, 1.0)]
    return [
        group(
            g,
            [
                episode(
                    f"g{g}m{m}",
                    reward=reward,
                    shape=shapes[(g + m) % 4],
                    seed=10 * g + m,
                    model=model,
                    off_policy=off_policy,
                    version=version,
                )
                for m, reward in enumerate(member_rewards)
            ],
        )
        for g, member_rewards in enumerate(rewards)
    ]


def batch(groups: Sequence[TrajectoryGroup], *, version: int = 0, max_lag: int = 2) -> Batch:
    return Batch(policy_version=version, max_lag=max_lag, groups=tuple(groups))


def whole_weights(model: Any) -> torch.Tensor:
    """All parameters in one float32 vector, also where ZeRO-3 divided them; every rank must call it."""
    from trainer.weights.source import WeightSource

    source = WeightSource(model, dtype=torch.float32)
    return torch.cat([tensor.clone().flatten() for _, tensor in source])


def with_steady_updates(learner: Any) -> Any:
    """`learner` with an AdamW whose eps is 1e-5, far above the rounding of a gradient and far below most elements.

    With the default of 1e-8 an element that is zero except for rounding moves a weight by up to the learning rate, in
    the direction of its rounding, which depends on the processor. Now an error d of an element moves it by lr d / 1e-5.
    """
    for settings in learner.engine.optimizer.param_groups:
        settings["eps"] = 1e-5
    return learner


def divide_small_weights() -> None:
    """Make ZeRO-3 and the sharded sums divide every weight: by default they keep small ones whole."""
    from trainer import deepspeed_settings
    from trainer.gradient import sharded_sums

    own = deepspeed_settings.deepspeed_config

    def changed(config: Config) -> dict[str, Any]:
        settings = own(config)
        settings["zero_optimization"]["stage3_param_persistence_threshold"] = 0
        return settings

    deepspeed_settings.deepspeed_config = changed
    sharded_sums.SMALL = 0


def config(model_path: Path, *, dtype: str = "float32", **sections: Any) -> Config:
    tree: dict[str, Any] = {
        "name": "test",
        "env": {"target": "x:Y"},
        "model": {"path": str(model_path), "dtype": dtype},
        "algorithm": {"rho_base": 1.0},  # a fixed number, which the plain references need
    }
    return parse({**tree, **sections}, source="test")
