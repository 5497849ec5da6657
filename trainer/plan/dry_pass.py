"""Runs the learner's own passes on tensors without content, and counts what they allocate and compute.

The model is on the meta device, which stands for a GPU in trainer/gradient/: each operation takes a second instead of
minutes, and no memory. Independent of DeepSpeed.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from agentrl.cli.doctor.plan.records import PassCost
from agentrl.config import Config
from agentrl.errors import ConfigError
from trainer import lora
from trainer.gradient import attention
from trainer.gradient.logprobs import score
from trainer.gradient.method_choice import is_recorded
from trainer.gradient.recorded_modules import check_modules, recording, tied_weight
from trainer.gradient.recorder import Recorder
from trainer.gradient.sharded_sums import ShardedSums
from trainer.gradient.sums import GradientSums, NoSums
from trainer.model import keep_activations
from trainer.packing import Pack
from trainer.plan.counting import Counter
from trainer.reference import is_base_of_adapters, reference_path

META = torch.device("meta")

PassKind = Literal["forward", "plain", "recorded", "exact", "sharded", "norms", "proxy"]
"""The passes of trainer/gradient/passes.py and plain.py: forward_only, differentiate, plain, with_norms into whole or
divided sums, exact_norms, proxy_norms."""


def settings_of(config: Config, model_config: Path | None) -> Any:
    """transformers' config: of a file, else of the model of `config`, or of the one that its warm start would make.

    Raises ConfigError.
    """
    from transformers import AutoConfig

    path = Path(config.model.path)
    if model_config is None and config.model.warmstart is not None and not (path / "config.json").is_file():
        from trainer.warmstart.tiny_model import model_settings

        return model_settings(config.model.warmstart)
    try:
        return AutoConfig.from_pretrained(model_config or config.model.path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{model_config or config.model.path}: no config of a model: {error}") from error


def planned_model(config: Config, settings: Any) -> Any:
    """The model as `Learner` prepares it, without content. Raises ConfigError for one that it would refuse."""
    from transformers import AutoModelForCausalLM

    try:
        with META:
            model = AutoModelForCausalLM.from_config(settings, dtype=getattr(torch, config.model.dtype))
            model.tie_weights()
            if config.model.lora is not None:
                model = lora.with_adapters(model, config.model.lora)
    except ValueError as error:
        raise ConfigError(f"{config.model.path}: not a causal language model: {error}") from error
    model = model.eval()
    keep_activations(model, config.learner)
    check_modules(model, is_recorded=is_recorded(config))
    attention.install(model)
    return model


def planned_reference(config: Config, settings: Any) -> Any:
    """The frozen second model of `config`, without content; None where it has none, or it is the policy itself.

    `settings` are the policy's. Raises ConfigError.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    if config.model.reference is None or is_base_of_adapters(config.model):
        return None
    if (path := reference_path(config.model)) != config.model.path:
        try:
            settings = AutoConfig.from_pretrained(path)
        except (OSError, ValueError) as error:
            raise ConfigError(f"model.reference={path}: no config of a model: {error}") from error
    with META:
        model = AutoModelForCausalLM.from_config(settings, dtype=getattr(torch, config.model.dtype))
        model.tie_weights()
    attention.install(model)
    return model.requires_grad_(False).eval()


def measure(model: Any, kind: PassKind, num_tokens: int, longest: int) -> PassCost:
    """One pass over a pack of `num_tokens` in segments of `longest` tokens, every token an action.

    Example: `measure(planned_model(config, settings), "plain", 16384, 8192).peak_bytes`.
    """
    bounds = (*range(0, num_tokens, longest), num_tokens)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    sums = _sums(trained, kind)
    known = [*model.parameters(), *model.buffers(), *(sums.present if sums else ())]
    with Counter("meta", known=known, attention_flop=_attention_flop(model.config, bounds)) as counter:
        match kind:
            case "forward":
                score(model, _pack(bounds))
            case "plain":
                _plain_backward(model, trained, _pack(bounds))
            case _:
                _recorded_backward(model, sums, _pack(bounds), is_split=kind != "recorded")
    return PassCost(
        num_tokens=num_tokens,
        peak_bytes=counter.peak_bytes,
        matrix_flop=counter.matrix_flop,
        moved_bytes=counter.moved_bytes,
    )


def _sums(trained: list[Tensor], kind: PassKind) -> GradientSums | None:
    match kind:
        case "exact" | "recorded":
            sums = GradientSums(trained, has_scores=kind == "exact")
        case "sharded":
            sums = ShardedSums(trained, rank=0, num_ranks=2, scatter=lambda whole: whole[: len(whole) // 2])
        case "norms":
            sums = NoSums(trained)
        case _:
            return None
    sums.reset()
    return sums


def _plain_backward(model: Any, trained: list[Tensor], pack: Pack) -> None:
    """Gradients are dropped as they appear: DeepSpeed's are counted by memory.py."""

    def drop(parameter: Tensor) -> None:
        parameter.grad = None

    hooks = [one.register_post_accumulate_grad_hook(drop) for one in trained]  # type: ignore[no-untyped-call]
    try:
        torch.autograd.backward(score(model, pack, call=model).logprob_N.sum())
    finally:
        for hook in hooks:
            hook.remove()


def _recorded_backward(model: Any, sums: GradientSums | None, pack: Pack, *, is_split: bool) -> None:
    recorder = Recorder(
        sums,
        bounds=pack.bounds if is_split else (0, pack.bounds[-1]),
        action_bounds=pack.action_bounds if is_split else (0, pack.bounds[-1]),
        has_norms=is_split,
        tied_weight=tied_weight(model),
        device=META,
    )
    with recording(model, recorder):
        logprob_N = score(model, pack, recorder).logprob_N
        # Two rewards, as an episode mostly has.
        ratio_n = [float(2 * segment >= recorder.num_segments) for segment in range(recorder.num_segments)]
        recorder.weigh(ratio_n=ratio_n, score_n=[1.0] * recorder.num_segments)
        torch.autograd.backward(logprob_N, torch.ones_like(logprob_N))


def _pack(bounds: tuple[int, ...]) -> Pack:
    ids_S = torch.zeros(bounds[-1], dtype=torch.int64, device=META)
    return Pack(
        input_ids_S=ids_S,
        position_ids_S=ids_S,
        bounds=bounds,
        predictor_N=ids_S,
        target_N=ids_S,
        action_bounds=bounds,
    )


def _attention_flop(settings: Any, bounds: tuple[int, ...]) -> float:
    """Of one causal product of queries and keys, in one layer."""
    heads, size = settings.num_attention_heads, attention.head_size(settings)
    return sum((end - start) ** 2 for start, end in itertools.pairwise(bounds)) * float(heads * size)
