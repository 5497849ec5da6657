"""The frozen second model: its scores, the base model under adapters, and what is refused as a reference."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from agentrl.config import WarmstartConfig
from agentrl.config.algorithm import AlgorithmConfig
from agentrl.errors import ConfigError
from tests.trainer.trainer_builders import (
    action_logprobs,
    batch,
    config,
    divide_small_weights,
    mixed_groups,
    uneven_episodes,
)
from trainer import deepspeed_settings, lora, reference
from trainer.gradient import attention
from trainer.gradient.step_gradient import Estimator
from trainer.learner import Learner
from trainer.model import load_model
from trainer.packing import ActionTensors, action_tensors
from trainer.warmstart.tiny_model import make_model, make_tokenizer, save

CPU = torch.device("cpu")
SHAPE = WarmstartConfig(vocab_size=384, hidden_size=32, num_layers=1, num_heads=1, num_kv_heads=1, intermediate_size=32)


@pytest.fixture(scope="module")
def teacher_dir(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another model with the tiny policy's vocabulary."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(tiny_model_dir)
    folder = tmp_path_factory.mktemp("teacher") / "model"
    save(folder, make_model(SHAPE, tokenizer, seed=7), tokenizer)
    return folder


def settings(policy: Path, given: Any, **model: Any) -> Any:
    algorithm = {"preset": "distill"} if given else {}
    return config(policy, model={"path": str(policy), "reference": given, **model}, algorithm=algorithm)


def texts() -> list[ActionTensors]:
    return [action_tensors(one, CPU) for one in uneven_episodes()]


def own_logprobs(model: Any) -> torch.Tensor:
    """The same from the model's own logits, episode by episode."""
    return torch.cat([action_logprobs(model, one).detach().double() for one in uneven_episodes()])


def test_a_teacher_scores_the_policys_tokens(tiny_model_dir: Path, tiny_model: Any, teacher_dir: Path) -> None:
    from transformers import AutoModelForCausalLM

    teacher = AutoModelForCausalLM.from_pretrained(teacher_dir, dtype="float32").eval()
    loaded = reference.load(settings(tiny_model_dir, str(teacher_dir)), tiny_model)
    assert loaded is not None
    torch.testing.assert_close(torch.cat(loaded.logprobs(texts())), own_logprobs(teacher), atol=1e-5, rtol=0)


def test_initial_is_the_model_before_training(tiny_model_dir: Path, tiny_model: Any) -> None:
    before = own_logprobs(tiny_model)
    loaded = reference.load(settings(tiny_model_dir, "initial"), tiny_model)
    with torch.no_grad():
        for parameter in tiny_model.parameters():
            parameter.add_(0.1)
    assert loaded is not None
    torch.testing.assert_close(torch.cat(loaded.logprobs(texts())), before, atol=1e-5, rtol=0)
    assert reference.load(settings(tiny_model_dir, None), tiny_model) is None


def test_under_adapters_the_base_model_is_the_reference_and_the_policy_stays_as_it_is(
    tiny_model_dir: Path, tiny_model: Any
) -> None:
    given = settings(tiny_model_dir, "initial", lora={"rank": 2})
    policy = load_model(given)
    attention.install(policy)
    base = own_logprobs(tiny_model)
    with lora.perturbed(policy):
        loaded = reference.load(given, policy)
        assert loaded is not None
        adapted = own_logprobs(policy)
        torch.testing.assert_close(torch.cat(loaded.logprobs(texts())), base, atol=1e-5, rtol=0)
        assert float((adapted - base).abs().max()) > 1e-2
        assert torch.equal(own_logprobs(policy), adapted)


def test_a_teacher_of_another_vocabulary_is_refused_by_name(
    tiny_model_dir: Path, tiny_model: Any, tmp_path: Path
) -> None:
    tokenizer = make_tokenizer(["quite another text, with other merges"] * 9, 300)
    save(tmp_path / "other", make_model(SHAPE, tokenizer, seed=0), tokenizer)
    with pytest.raises(
        ConfigError, match=r"model\.reference=.*other has another vocabulary than model\.path="
    ) as refused:
        reference.load(settings(tiny_model_dir, str(tmp_path / "other")), tiny_model)
    assert "is '" in str(refused.value) and "here" in str(refused.value)


def test_a_teacher_that_cannot_score_every_id_is_refused(
    tiny_model_dir: Path, tiny_model: Any, teacher_dir: Path
) -> None:
    tiny_model.resize_token_embeddings(500)
    with pytest.raises(ConfigError, match=r"a head of .* rows and the policy one of 500"):
        reference.load(settings(tiny_model_dir, str(teacher_dir)), tiny_model)


def test_a_teacher_that_is_not_there_is_refused_by_its_key(tiny_model_dir: Path, tiny_model: Any) -> None:
    with pytest.raises(ConfigError, match=r"model\.reference=/nowhere"):
        reference.load(settings(tiny_model_dir, "/nowhere"), tiny_model)


def test_distillation_moves_the_student_towards_its_teacher(
    tiny_model_dir: Path, tiny_model: Any, teacher_dir: Path
) -> None:
    model = {"path": str(tiny_model_dir), "reference": str(teacher_dir)}
    learner = Learner(config(tiny_model_dir, model=model, learner={"lr": 3e-4}, algorithm={"preset": "distill"}))
    groups = mixed_groups(tiny_model, off_policy=0.0)
    before_M = differences(learner.model, teacher_dir, groups)
    metrics = [learner.step(batch(groups, version=version, max_lag=9)).metrics for version in range(4)]
    assert metrics[0]["learner/reference_kl"] == pytest.approx(float(before_M.mean()), rel=1e-3)
    assert float(differences(learner.model, teacher_dir, groups).norm()) < 0.9 * float(before_M.norm())


def differences(model: Any, teacher_dir: Path, groups: list[Any]) -> torch.Tensor:
    """log pi - log teacher of every action token."""
    from transformers import AutoModelForCausalLM

    teacher = AutoModelForCausalLM.from_pretrained(teacher_dir, dtype="float32").eval()
    with torch.no_grad():
        pairs = [(action_logprobs(model, t), action_logprobs(teacher, t)) for g in groups for t in g.trajectories]
    return torch.cat([own_N - other_N for own_N, other_N in pairs])


@pytest.mark.parametrize("zero_stage", [1, 3])
def test_a_penalty_on_adapters_needs_no_second_model(
    tiny_model_dir: Path, tiny_model: Any, monkeypatch: pytest.MonkeyPatch, zero_stage: int
) -> None:
    """Fresh adapters add nothing: the divergence is 0 in the first step, and what the steps made of it afterwards."""
    monkeypatch.setattr(deepspeed_settings, "deepspeed_config", deepspeed_settings.deepspeed_config)
    divide_small_weights()
    given = config(
        tiny_model_dir,
        model={"path": str(tiny_model_dir), "reference": "initial", "lora": {"rank": 2}},
        learner={"lr": 1e-2, "zero_stage": zero_stage},
        algorithm={"preset": "tba", "kl_beta": 0.02, "kl_beta_end": 0.0, "kl_beta_steps": 4},
    )
    learner, groups = Learner(given), mixed_groups(tiny_model, off_policy=0.0)
    metrics = [learner.step(batch(groups, version=version, max_lag=3)).metrics for version in range(2)]
    assert [one["learner/kl_beta"] for one in metrics] == pytest.approx([0.02, 0.015])
    assert metrics[0]["learner/reference_kl"] == pytest.approx(0.0, abs=1e-6)
    # The data are the initial policy's, which is the reference: both divergences are from the same model.
    assert abs(metrics[1]["learner/reference_kl"]) > 1e-4
    assert metrics[1]["learner/mean_weight"] != pytest.approx(1.0, abs=1e-6)


def test_a_penalty_beside_exact_norms_takes_two_passes(tiny_model_dir: Path, tiny_model: Any) -> None:
    model, algorithm = {"path": str(tiny_model_dir), "reference": "initial"}, {"rho_base": 1.0, "kl_beta": 0.1}
    learner, groups = Learner(config(tiny_model_dir, model=model, algorithm=algorithm)), mixed_groups(tiny_model)
    assert learner.step(batch(groups)).metrics["learner/grad_norm"] > 0
    with pytest.raises(ConfigError, match=r"set learner\.gradient: two_pass, or auto"):
        Learner(config(tiny_model_dir, model=model, algorithm=algorithm, learner={"gradient": "one_pass"}))


def test_a_config_without_the_model_that_its_objective_needs_is_refused_and_so_is_an_unused_one(
    tiny_model_dir: Path, tiny_model: Any
) -> None:
    model = {"path": str(tiny_model_dir)}
    for algorithm in ({"preset": "tba"}, {"preset": "distill"}, {"preset": "grpo", "kl_beta": 0.1}):
        with pytest.raises(ConfigError, match=r"needs a frozen model .* set model\.reference=initial"):
            config(tiny_model_dir, model=model, algorithm=algorithm)
    with pytest.raises(ConfigError, match=r"model\.reference=initial does nothing"):
        config(tiny_model_dir, model={**model, "reference": "initial"}, algorithm={"preset": "grpo"})
    with pytest.raises(ConfigError, match=r"needs the log-probabilities of a frozen model: set model\.reference"):
        Estimator(tiny_model, AlgorithmConfig(preset="distill"))


def test_a_frozen_model_with_a_nan_refuses_the_step_and_keeps_the_weights(
    tiny_model_dir: Path, tiny_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_: Any, texts: list[ActionTensors]) -> list[torch.Tensor]:
        return [torch.full(one.target_N.shape, math.nan, dtype=torch.float64) for one in texts]

    monkeypatch.setattr(reference.Reference, "logprobs", broken)
    model, algorithm = {"path": str(tiny_model_dir), "reference": "initial"}, {"kl_beta": 0.1, "preset": "grpo"}
    learner = Learner(config(tiny_model_dir, model=model, algorithm=algorithm))
    before = own_logprobs(learner.model)
    output = learner.step(batch(mixed_groups(tiny_model)))
    assert output.skipped and torch.equal(own_logprobs(learner.model), before)
