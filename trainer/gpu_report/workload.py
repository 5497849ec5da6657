"""Models of several sizes and batches of synthetic trajectories, on disk. Independent of the methods.

Needs torch alone to be read, for another project's environment reads it too.
Shapes: _T tokens of a trajectory.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

MEAN_REWARD = 0.4
RATIO_STD = 0.5
"""Of a trajectory's log weight: what a few versions of lag leave behind."""
TURNS = 4
MODEL, BATCH = "model", "batch.pt"


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """Groups of trajectories: all equally long, or the quantiles of a log-normal distribution of sigma 1."""

    num_groups: int
    group_size: int
    tokens: int  # of each; of the median where they are mixed
    is_mixed: bool = False

    def of_each(self) -> list[int]:
        """Tokens of every trajectory, group after group; mixed ones in a fixed random order."""
        number = self.num_groups * self.group_size
        if not self.is_mixed:
            return [self.tokens] * number
        normal = statistics.NormalDist()
        lengths = [round(self.tokens * math.exp(normal.inv_cdf((i + 0.5) / number))) for i in range(number)]
        random.Random(0).shuffle(lengths)
        return lengths


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One trajectory, as every method reads it from the file."""

    group: int
    reward: float
    ids_T: Tensor  # int64
    acted_T: Tensor  # bool
    behavior_T: Tensor  # float64, 0 where not acted


# The batch of each length, by the model's size: small enough for a CPU where the model is one for CPUs.
BATCHES: dict[str, dict[str, Lengths]] = {
    "tiny": {
        "512": Lengths(num_groups=1, group_size=4, tokens=64),
        "mixed": Lengths(num_groups=2, group_size=4, tokens=24, is_mixed=True),
    },
    "1M": {
        "512": Lengths(num_groups=1, group_size=8, tokens=512),
        "2k": Lengths(num_groups=1, group_size=2, tokens=2048),
        "16k": Lengths(num_groups=1, group_size=2, tokens=16384),
        "mixed": Lengths(num_groups=4, group_size=8, tokens=64, is_mixed=True),
    },
    "20M": {
        "512": Lengths(num_groups=1, group_size=4, tokens=512),
        "2k": Lengths(num_groups=1, group_size=2, tokens=2048),
        "16k": Lengths(num_groups=1, group_size=2, tokens=16384),
        "mixed": Lengths(num_groups=4, group_size=8, tokens=64, is_mixed=True),
    },
}
BATCHES["100M"] = {
    "512": Lengths(num_groups=1, group_size=4, tokens=512),
    "2k": Lengths(num_groups=1, group_size=2, tokens=2048),
    "16k": Lengths(num_groups=1, group_size=2, tokens=16384),
    "mixed": Lengths(num_groups=2, group_size=8, tokens=64, is_mixed=True),
}
_ON_A_GPU = {
    "512": Lengths(num_groups=8, group_size=8, tokens=512),
    "2k": Lengths(num_groups=4, group_size=8, tokens=2048),
    "16k": Lengths(num_groups=1, group_size=8, tokens=16384),
    "mixed": Lengths(num_groups=8, group_size=8, tokens=1024, is_mixed=True),
}
BATCHES |= {"0.5B": _ON_A_GPU, "1.5B": _ON_A_GPU}


def make_model(size: str) -> Any:
    """A random model in float32 whose logits are spread as a trained one's."""
    from trainer.gpu_report import random_models as models
    from trainer.gpu_report.random_models import Shape

    qwen = {"num_kv_heads": 2, "vocab_size": 151936}
    architecture, shape = {
        "tiny": ("Qwen3", Shape(hidden_size=64, intermediate_size=128, num_layers=2, num_heads=2, num_kv_heads=1,
                                head_dim=32, vocab_size=384)),
        "1M": ("Qwen3", Shape(hidden_size=128, intermediate_size=384, num_layers=4, num_heads=4, num_kv_heads=2,
                              head_dim=32, vocab_size=2048)),
        "20M": ("Qwen3", Shape(hidden_size=512, intermediate_size=1536, num_layers=6, num_heads=8, num_kv_heads=4,
                               head_dim=64, vocab_size=4096)),
        "100M": ("Qwen3", Shape(hidden_size=768, intermediate_size=2304, num_layers=12, num_heads=12, num_kv_heads=4,
                                head_dim=64, vocab_size=16384)),
        "0.5B": ("Qwen2", Shape(hidden_size=896, intermediate_size=4864, num_layers=24, num_heads=14, head_dim=64,
                                **qwen)),
        "1.5B": ("Qwen2", Shape(hidden_size=1536, intermediate_size=8960, num_layers=28, num_heads=12, head_dim=128,
                                **qwen)),
    }[size]  # fmt: skip
    return models.make(architecture, shape, tied=True)


def make_batch(model: Any, lengths: Lengths) -> list[Sample]:
    """Trajectories of several turns with behaviour log-probabilities about as far off as a few versions of lag."""
    torch.manual_seed(0)
    samples = []
    for index, num_tokens in enumerate(lengths.of_each()):
        ids_T = torch.randint(model.config.vocab_size, (num_tokens,))
        acted_T = _acted(num_tokens)
        logprob_T = _own_logprobs(model, ids_T)
        noise_T = torch.randn(num_tokens, dtype=torch.float64) * (RATIO_STD / float(acted_T.sum()) ** 0.5)
        samples.append(
            Sample(
                group=index // lengths.group_size,
                # Each group has both rewards.
                reward=float(index % lengths.group_size < max(1, MEAN_REWARD * lengths.group_size)),
                ids_T=ids_T,
                acted_T=acted_T,
                behavior_T=((logprob_T + noise_T).clamp(max=0) * acted_T),
            )
        )
    return samples


def _acted(num_tokens: int) -> Tensor:
    """An eighth is the prompt; the rest are turns. The last quarter of each, except the last, is the tool's answer."""
    acted_T = torch.ones(num_tokens, dtype=torch.bool)
    prompt = max(2, num_tokens // 8)
    acted_T[:prompt] = False
    turn = (num_tokens - prompt) // TURNS
    for number in range(1, TURNS):
        end = prompt + number * turn
        acted_T[end - turn // 4 : end] = False
    return acted_T


@torch.no_grad()
def _own_logprobs(model: Any, ids_T: Tensor) -> Tensor:
    """[T] float64; 0 at the first token."""
    hidden_TD = model.model(input_ids=ids_T[None].to(model.device), use_cache=False).last_hidden_state[0]
    logprobs = [torch.zeros(1, dtype=torch.float64)]
    for hidden_CD, target_C in zip(torch.split(hidden_TD[:-1], 1024), torch.split(ids_T[1:], 1024), strict=True):
        logits_CV = model.get_output_embeddings()(hidden_CD).float()
        chosen_C = logits_CV.gather(1, target_C[:, None].to(logits_CV.device))[:, 0]
        logprobs.append((chosen_C - logits_CV.logsumexp(dim=1)).double().cpu())
    return torch.cat(logprobs)


def save(folder: Path, size: str, lengths: Lengths, device: torch.device) -> None:
    """Model (float32 on CPUs, bfloat16 on GPUs) with a tokenizer, and batch."""
    from trainer.gpu_report import random_models as models

    model = make_model(size).to(dtype_of(device))
    models.save(model, folder / MODEL)
    samples = make_batch(model.to(device), lengths)
    torch.save([vars_of(sample) for sample in samples], folder / BATCH)


def vars_of(sample: Sample) -> dict[str, Any]:
    """What `load` makes the same sample of."""
    return {name: getattr(sample, name) for name in sample.__dataclass_fields__}


def load(folder: Path) -> list[Sample]:
    """The batch, in the order of its groups."""
    return [Sample(**fields) for fields in torch.load(folder / BATCH, weights_only=True)]


def load_model(folder: Path, device: torch.device) -> Any:
    """The model in evaluation mode: no method has dropout."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder / MODEL, dtype=dtype_of(device)).to(device).eval()


def dtype_of(device: torch.device) -> torch.dtype:
    """What a learner uses there."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def pack_tokens(device: torch.device) -> int:
    """Budget of a pack: the learner's default on a CPU, that of the project's goal on a GPU."""
    return 16384 if device.type == "cuda" else 8192


def advantages(samples: Sequence[Sample]) -> list[float]:
    """GRPO's: reward minus the group's mean, over its sample standard deviation."""
    found = []
    for sample in samples:
        rewards = [other.reward for other in samples if other.group == sample.group]
        found.append((sample.reward - statistics.mean(rewards)) / statistics.stdev(rewards))
    return found


def padding(samples: Sequence[Sample]) -> float:
    """Tokens of the batch padded to its longest, over its tokens."""
    lengths = [len(sample.ids_T) for sample in samples]
    return max(lengths) * len(lengths) / sum(lengths)


def num_flops(config: Any, samples: Sequence[Sample], num_parameters: int) -> float:
    """Of a plain step: 6 a weight and token, the head's on actions only, and causal attention's two products."""
    num_tokens, num_actions = (
        sum(len(one.ids_T) for one in samples),
        sum(int(one.acted_T.sum()) for one in samples),
    )
    head = config.vocab_size * config.hidden_size
    attention = sum(6 * len(one.ids_T) ** 2 for one in samples)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    width = config.num_hidden_layers * config.num_attention_heads * head_dim
    return float(6 * (num_parameters - head) * num_tokens + 6 * head * num_actions + attention * width)
