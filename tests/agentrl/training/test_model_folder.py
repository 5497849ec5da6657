"""Models that no run can train are refused by name before anything starts, from the config.json of real classes."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from agentrl.cli.main import app
from agentrl.config import parse
from agentrl.errors import ConfigError
from agentrl.training.model_folder import check_trainable, why_not_trainable

TINY = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 64}
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}


def config_json(name: str, **settings: Any) -> dict[str, Any]:
    import transformers

    found: dict[str, Any] = json.loads(getattr(transformers, f"{name}Config")(**{**TINY, **settings}).to_json_string())
    return found


@pytest.mark.parametrize("name", ["Qwen2", "Qwen3", "Llama", "Mistral", "Gemma3Text"])
def test_dense_models_pass(name: str) -> None:
    assert why_not_trainable(config_json(name)) is None


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("Qwen2Moe", "num_experts"),
        ("Qwen3Moe", "num_local_experts"),
        ("Mixtral", "num_local_experts"),
        ("DeepseekV3", "n_routed_experts"),
        ("GptOss", "num_local_experts"),
        ("Olmoe", "num_experts"),
    ],
)
def test_a_mixture_of_experts_is_refused_by_name(name: str, key: str) -> None:
    reason = why_not_trainable(config_json(name))
    assert reason is not None and reason.startswith(f"is a mixture of experts ({key}: ")
    assert "Take a dense model" in reason


def test_experts_inside_a_section_are_found() -> None:
    assert why_not_trainable({"model_type": "some_vl", "text_config": {"num_local_experts": 16}}) is not None
    assert why_not_trainable({"model_type": "dense", "num_experts": 1, "n_routed_experts": None}) is None


@pytest.mark.parametrize("settings", [FP8, {"quant_method": "awq", "bits": 4}, {"quant_method": "compressed-tensors"}])
def test_a_quantised_checkpoint_is_refused_by_name(tmp_path: Path, settings: dict[str, Any]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config_json("Qwen3") | {"quantization_config": settings}))
    config = parse(
        {"name": "t", "env": {"target": "envs.modmath:ModMath"}, "model": {"path": str(tmp_path)}}, source="test"
    )
    with pytest.raises(ConfigError, match=rf"is quantised .*{settings['quant_method']}.*bfloat16 checkpoint"):
        check_trainable(config)


def test_a_run_refuses_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config_json("Qwen3Moe")))
    quickstart = str(Path(__file__).parents[3] / "configs" / "quickstart.yaml")
    options = [f"model.path={tmp_path}", f"out_dir={tmp_path / 'runs'}"]
    done = CliRunner().invoke(app, ["train", quickstart, *options])
    assert done.exit_code != 0 and "mixture of experts" in " ".join(done.output.replace("│", "").split())
    assert not list(tmp_path.glob("runs/*/logs/*"))


def test_the_learner_itself_names_the_class() -> None:
    import transformers

    from trainer.gradient.recorded_modules import check_modules

    config = transformers.Qwen3MoeConfig(**TINY, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
    with pytest.raises(ConfigError, match=r"^Qwen3Moe\w+ "):
        check_modules(transformers.Qwen3MoeForCausalLM(config))
