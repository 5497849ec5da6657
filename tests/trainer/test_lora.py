"""Adapters: the exact one-pass gradient, steps that move nothing else, merged weights, exports, refusals."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from agentrl.config import Config, LoraConfig, load
from agentrl.engine.base import is_delta
from agentrl.engine.checksum import checksum_of
from agentrl.engine.vllm_engine import VLLMEngine
from agentrl.errors import ConfigError
from agentrl.training.model_folder import Origin
from agentrl.types import Probe, WeightsRef
from tests.conftest import VLLMServer
from tests.device import parity_bound, without_gpus
from tests.trainer.gradient.test_recorded_modules import assert_same, one_pass, single_backwards
from tests.trainer.trainer_builders import (
    ARCHITECTURES,
    architecture,
    batch,
    config,
    divide_small_weights,
    mixed_groups,
    plain_logprobs,
    whole_weights,
    with_steady_updates,
)
from trainer import deepspeed_settings, lora
from trainer.gradient.logit_rule import logit_rule
from trainer.learner import Learner
from trainer.model import checkpoint_layers, load_model
from trainer.weights import folder as weights
from trainer.weights.delta import DeltaFolders
from trainer.weights.source import WeightSource

ROOT = Path(__file__).parents[2]
ORIGIN = Origin(run="lora", version=0)
TEXT = list(range(100, 180))
SETTINGS = {"lr": 1e-2, "grad_clip": 0.05, "weight_decay": 0.01}
SMALL = {"rank": 4, "alpha": 8}


def adapted(model: Any, **settings: Any) -> Any:
    """`model` with adapters that add something."""
    found = lora.with_adapters(model, LoraConfig(**{**SMALL, **settings})).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in found.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return found


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_one_packed_backward_equals_a_loop_of_single_ones(name: str) -> None:
    """Norms and both sums of A and B; the frozen weights have none."""
    model = adapted(architecture(name))
    assert_same(one_pass(model), single_backwards(model, torch.float64), 1e-5)


def learner_config(path: Path, dtype: str = "float32", **sections: Any) -> Config:
    return config(path, **{"model": {"path": str(path), "dtype": dtype, "lora": SMALL}, **sections})


def frozen(model: Any) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters() if "lora_" not in name}


def trained(model: Any) -> torch.Tensor:
    return torch.cat([p.detach().float().flatten() for name, p in model.named_parameters() if "lora_" in name])


def test_plain_gradients_of_adapters_make_the_same_step(tiny_model_dir: Path, tiny_model: Any) -> None:
    """With checkpointed layers, whose inputs need no gradient below the first adapter; stage 2 against sums."""
    after = []
    for gradient in ("one_pass", "plain"):
        settings = {
            **SETTINGS,
            "gradient": gradient,
            "zero_stage": 2,
            "gradient_checkpointing": True,
            "pack_tokens": 30,
        }
        sections = {"learner": settings, "algorithm": {"preset": "grpo", "rho_base": 1.0}}
        learner = with_steady_updates(Learner(learner_config(tiny_model_dir, **sections)))
        before = trained(learner.model)
        learner.step(batch(mixed_groups(tiny_model)))
        after.append(trained(learner.model) - before)
    assert float((after[1] - after[0]).norm() / after[0].norm()) < 1e-4


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("zero_stage", [0, 1, 2])
def test_a_step_moves_the_adapters_alone(tiny_model_dir: Path, tiny_model: Any, dtype: str, zero_stage: int) -> None:
    learner = Learner(learner_config(tiny_model_dir, dtype, learner={"lr": 1e-2, "zero_stage": zero_stage}))
    weights_before, adapters_before = frozen(learner.model), trained(learner.model)
    learner.step(batch(mixed_groups(tiny_model)))
    assert all(torch.equal(p, weights_before[name]) for name, p in frozen(learner.model).items())
    assert not torch.equal(trained(learner.model), adapters_before)
    assert [p.shape for p in learner._method.parameters] == [
        p.shape for name, p in learner.model.named_parameters() if "lora_" in name
    ]


def test_merged_weights_are_those_of_peft_under_the_base_models_names(tiny_model: Any) -> None:
    names = [name for name, _ in WeightSource(tiny_model, dtype=torch.float32)]
    model = adapted(tiny_model)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    ours = dict(WeightSource(model, dtype=torch.float32))
    assert list(ours) == names
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    theirs = copy.deepcopy(model).merge_and_unload().state_dict()
    assert all(torch.allclose(tensor, theirs[name], atol=1e-6, rtol=1e-6) for name, tensor in ours.items())


def test_what_travels_is_known_without_merging_and_the_same_in_every_pass(tiny_model: Any) -> None:
    source = WeightSource(adapted(tiny_model), dtype=torch.bfloat16)
    said = [(meta.name, meta.dtype, meta.shape) for meta in source.metadata()]
    assert said == [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in source]
    assert checksum_of(source) == checksum_of(source)


def test_an_export_loads_merged_and_as_an_adapter(tiny_model: Any, tiny_model_dir: Path, tmp_path: Path) -> None:
    import peft
    from transformers import AutoModelForCausalLM

    model = adapted(tiny_model)
    source = WeightSource(model, dtype=torch.float32)
    weights.export(source, model, str(tiny_model_dir), tmp_path / "final", origin=ORIGIN)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "final").eval()
    base = AutoModelForCausalLM.from_pretrained(tiny_model_dir).eval()
    loaded = peft.PeftModel.from_pretrained(base, tmp_path / "final" / "adapter").eval()
    ids = list(range(20, 80))
    with torch.no_grad():
        theirs = plain_logprobs(model, ids)
        assert float((plain_logprobs(merged, ids) - theirs).abs().max()) < 1e-5
        assert torch.equal(plain_logprobs(loaded, ids), theirs)
    assert type(merged).__name__ == "Qwen3ForCausalLM"


@pytest.mark.parametrize(
    ("targets", "reason"),
    [
        (["nope"], "target_modules: .*nope"),
        (["lm_head"], "lm_head is the output head"),
        (["embed_tokens"], "embed_tokens is not a linear layer but Embedding"),
    ],
)
def test_targets_that_cannot_be_trained_are_refused_by_name(targets: list[str], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        lora.with_adapters(architecture("Qwen3"), LoraConfig(target_modules=tuple(targets)))


def test_dropout_is_refused_with_its_reason(tiny_model_dir: Path) -> None:
    with pytest.raises(ConfigError, match=r"model.lora: dropout=0.1 must be 0: the engine samples"):
        config(tiny_model_dir, model={"path": "x", "lora": {"dropout": 0.1}})


def test_an_adapter_as_model_path_is_refused(tiny_model: Any, tiny_model_dir: Path, tmp_path: Path) -> None:
    adapted(tiny_model).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="is an adapter, not a model"):
        load_model(config(tmp_path))


def test_checkpointed_layers_are_exact() -> None:
    model = adapted(architecture("Qwen3-tied"))
    theirs = single_backwards(model, torch.float64)
    logit_rule(model)  # a forward of its own, once
    calls: list[int] = []
    lora.base_of(model).model.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    checkpoint_layers(model)
    assert_same(one_pass(model), theirs, 1e-5)
    assert len(calls) == 2, "the layer was not computed again in the backward"


STAGE_3 = {**SETTINGS, "zero_stage": 3, "gradient_checkpointing": True, "pack_tokens": 30}


@pytest.mark.slow
def test_two_ranks_under_zero_3_make_the_same_update_as_one_under_zero_0(
    tiny_model_dir: Path, tiny_model: Any, tmp_path: Path
) -> None:
    """Compares merged weights, which the source gathers on both ranks."""
    groups, before = mixed_groups(tiny_model), whole_weights(tiny_model)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    sections = {"model": learner_config(tiny_model_dir).model.model_dump(), "learner": STAGE_3}
    command = [*launcher, "--module", "tests.trainer.two_ranks", str(tiny_model_dir), str(tmp_path)]
    env = os.environ | without_gpus()
    subprocess.run([*command, json.dumps(sections)], cwd=ROOT, check=True, timeout=120, env=env)
    theirs = torch.load(tmp_path / "result.pt")["weights"]
    learner = with_steady_updates(Learner(learner_config(tiny_model_dir, learner={**SETTINGS, "zero_stage": 0})))
    for version in range(3):
        learner.step(batch(groups, version=version))
    ours = whole_weights(learner.model)
    assert float((ours - theirs).norm() / (ours - before).norm()) < 1e-4


def test_an_export_from_zero_3_has_whole_adapters(
    tiny_model_dir: Path, tiny_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from safetensors.torch import load_file

    monkeypatch.setattr(deepspeed_settings, "deepspeed_config", deepspeed_settings.deepspeed_config)
    divide_small_weights()
    learner = Learner(learner_config(tiny_model_dir, learner=STAGE_3))
    assert all(parameter.numel() == 0 for parameter in learner.model.parameters())
    learner.step(batch(mixed_groups(tiny_model)))
    source = WeightSource(learner.model, dtype=torch.float32)
    weights.export(source, learner.model, str(tiny_model_dir), tmp_path, origin=ORIGIN)
    base = dict(WeightSource(tiny_model, dtype=torch.float32))
    merged, adapter = (
        load_file(tmp_path / "model.safetensors"),
        load_file(tmp_path / "adapter/adapter_model.safetensors"),
    )
    name = "model.layers.1.mlp.up_proj"
    down_RI, up_OR = (adapter[f"base_model.model.{name}.lora_{part}.weight"] for part in "AB")
    expected = base[f"{name}.weight"] + 2 * up_OR @ down_RI
    assert torch.allclose(merged[f"{name}.weight"], expected, atol=1e-6)
    assert float(up_OR.abs().max()) > 0
    assert set(merged) == set(base)


@pytest.mark.engine
@pytest.mark.parametrize("travels", ["merged", "adapter"])
async def test_the_engine_says_what_the_adapted_policy_says(
    vllm_server: VLLMServer, tiny_model_dir: Path, tiny_model: Any, tmp_path: Path, travels: str
) -> None:
    """Trained adapters are published, merged here or by the engine, and proven by version, checksum and logprobs."""
    learner = Learner(learner_config(tiny_model_dir, learner={"lr": 3e-2}))
    first = published(learner, tmp_path / "first", 0)
    probe_before = learner.logprobs(TEXT)
    for version in range(3):
        learner.step(batch(mixed_groups(tiny_model), version=version))
    async with VLLMEngine(vllm_server.url, model=vllm_server.model) as engine:
        try:
            folders = DeltaFolders(tmp_path / "last", whole_every=8) if travels == "adapter" else None
            ref = published(learner, tmp_path / "last", 3, folders)
            assert is_delta(ref) == (travels == "adapter")
            await engine.update_weights(ref)  # compares the version, the checksum and the probe itself
            assert set(await engine.control.checksums()) == {ref.checksum}
            scored = torch.tensor(await engine.score(TEXT))
        finally:
            await engine.update_weights(first)
    ours = torch.tensor(learner.logprobs(TEXT))
    assert float((ours - torch.tensor(probe_before)).abs().max()) > 0.1
    assert float((ours - scored).abs().max()) < parity_bound()


def published(learner: Learner, folder: Path, version: int, folders: DeltaFolders | None = None) -> WeightsRef:
    ids = tuple(range(30, 70))
    probe = Probe(token_ids=ids, logprobs=tuple(learner.logprobs(ids)))
    source = WeightSource(learner.model, dtype=torch.float32)
    if folders is not None:
        return folders.publish(source, policy_version=version, probe=probe)
    return weights.publish(source, folder, policy_version=version, probe=probe)


def test_the_example_of_the_docs_loads(tmp_path: Path) -> None:
    section = (ROOT / "docs" / "algorithms.md").read_text().split("\n## LoRA\n")[1]
    example = section.split("```yaml\n")[1].split("```")[0]
    (tmp_path / "lora.yaml").write_text("name: docs\nenv: {target: x:Y}\n" + example)
    found = load(tmp_path / "lora.yaml").model
    assert found.lora == LoraConfig(rank=16, alpha=32)
