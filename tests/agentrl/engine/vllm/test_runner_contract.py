"""What we use of vLLM's two model runners and of its output head: an upgrade that changes it fails here.

A GPU gets runner V2; tests/agentrl/engine/test_gpu_scheduling.py runs it, with interpreted kernels.
"""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.agentrl.engine.vllm.test_contract import named

V1, V2 = "vllm.v1.worker.gpu_model_runner:GPUModelRunner", "vllm.v1.worker.gpu.model_runner:GPUModelRunner"


@pytest.mark.parametrize("runner", [V1, V2], ids=["V1", "V2"])
@pytest.mark.parametrize(
    ("method", "parameters"),
    [
        ("get_model", "self"),  # by our worker extension
        ("reload_weights", "self weights_iterator weights_path is_checkpoint_format"),  # by POST /collective_rpc
        ("reset_lora_state", "self"),  # by vLLM's worker at the end of a weight update
    ],
)
def test_both_runners_have_what_a_weight_update_calls(runner: str, method: str, parameters: str) -> None:
    assert list(inspect.signature(getattr(named(runner), method)).parameters) == parameters.split()


def test_the_extension_touches_nothing_of_a_runner_but_its_model() -> None:
    from agentrl.engine.vllm import worker

    source = inspect.getsource(worker)
    assert source.count("model_runner.") == source.count("model_runner.get_model()") == 1


@pytest.mark.parametrize("part", ["sampler:Sampler", "prompt_logprob:PromptLogprobsWorker"])
def test_runner_v2_is_told_which_logprobs_to_report(part: str) -> None:
    assert "logprobs_mode" in inspect.signature(named(f"vllm.v1.worker.gpu.sample.{part}")).parameters
    assert "processed_logprobs" in named("vllm.v1.worker.gpu.sample.sampler:PROCESSED_LOGPROBS_MODES")


def head(weight: torch.Tensor, method: Any) -> Any:
    return SimpleNamespace(weight=weight, quant_method=method)


def test_a_float32_head_multiplies_the_weights_it_is_given_and_keeps_no_copy() -> None:
    embedding = named("vllm.model_executor.layers.vocab_parallel_embedding:UnquantizedEmbeddingMethod")
    apply = named("vllm.model_executor.layers.logits_processor:LogitsProcessor._apply_head")
    processor = SimpleNamespace(head_dtype=torch.float32)
    hidden, weight = (torch.randn(shape, dtype=torch.bfloat16) for shape in ((3, 8), (16, 8)))
    lm_head = head(weight, embedding())
    logits = apply(processor, lm_head, hidden, None)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, hidden.float() @ weight.float().t())
    weight.mul_(2)  # as a weight update does, in place
    torch.testing.assert_close(apply(processor, lm_head, hidden, None), 2 * logits)
    with pytest.raises(ValueError, match="unquantized lm_head"):
        apply(processor, head(weight, object()), hidden, None)


def test_the_override_of_our_command_names_the_heads_dtype() -> None:
    from transformers import Qwen3Config

    dtype_of = named("vllm.config.model:_get_head_dtype")
    config = Qwen3Config()
    assert dtype_of(config=config, dtype=torch.bfloat16, runner_type="generate") == torch.bfloat16
    config.update({"head_dtype": "float32"})
    assert dtype_of(config=config, dtype=torch.bfloat16, runner_type="generate") == torch.float32


def test_triton_reads_the_variable_of_our_command_and_compiles_anew_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton import knobs
    from triton._C.libtriton import get_cache_invalidating_env_vars

    monkeypatch.setenv("TRITON_F32_DEFAULT", "ieee")
    assert knobs.language.fp32_default == "ieee"
    assert get_cache_invalidating_env_vars()["TRITON_F32_DEFAULT"] == "ieee"
