"""transformers' own logprobs of two models, with which an engine's are compared."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from agentrl.types import Completion, Probe, WeightsRef

PROMPT = [(7 * i) % 300 + 5 for i in range(40)]


class Judge:
    """Two models in Hugging Face layout and their own log-probabilities."""

    def __init__(self, folders: Sequence[Path]) -> None:
        from transformers import AutoModelForCausalLM

        self.folders = folders
        self._models = [AutoModelForCausalLM.from_pretrained(folder) for folder in folders]

    def logprobs(self, token_ids: Sequence[int], which: int) -> list[float]:
        """[T] -> [T-1]"""
        import torch

        tokens = torch.tensor([token_ids])
        with torch.no_grad():
            logprobs = self._models[which](tokens).logits[0, :-1].log_softmax(-1)
        return logprobs.gather(1, tokens[0, 1:, None])[:, 0].tolist()

    def ref(self, version: int, which: int) -> WeightsRef:
        """The weights of `which`, as version `version`."""
        probe = Probe(token_ids=tuple(PROMPT), logprobs=tuple(self.logprobs(PROMPT, which)))
        path = self.folders[which]
        num_bytes = (path / "model.safetensors").stat().st_size
        return WeightsRef(
            policy_version=version, num_bytes=num_bytes, update_info={"path": str(path)}, checksum="", probe=probe
        )


def difference(ours: Sequence[float], theirs: Sequence[float]) -> float:
    return max(abs(a - b) for a, b in zip(ours, theirs, strict=True))


def worst(completion: Completion, prompt: Sequence[int], judge: Judge, first_version: int) -> float:
    """Largest |engine - transformers|, each token judged by the model that its span names."""
    tokens = [*prompt, *completion.token_ids]
    by_model = [judge.logprobs(tokens, which)[len(prompt) - 1 :] for which in (0, 1)]
    versions = list(completion.policy_versions())
    expected = [by_model[(version - first_version) % 2][t] for t, version in enumerate(versions)]
    return difference(completion.behavior_logprobs, expected)
