"""TRL's own GRPO loss on our batch: run by the Python of an environment that has TRL, with this project as its folder.

The batch is laid out as TRL's trainer does: prompts padded on the left and completions on the right, to the longest of
the batch; observations inside a completion are masked by `tool_mask`; micro-batches of TRL's default 8 rows.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from benchmarks.learner import child
from trainer.gpu_report import workload

ROWS = 8


class TrlStep:
    """One gradient by TRL."""

    def __init__(self, model: Any, samples: Sequence[workload.Sample]) -> None:
        self._trainer = _trainer(model, num_rows=min(ROWS, len(samples)), num_samples=len(samples))
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._model = model
        model.train()  # TRL divides by the number of micro-batches in training mode only; no layer here has dropout
        batch = _padded(samples, model.device)
        rows = min(ROWS, len(samples))
        self._inputs = [
            {name: tensor[at : at + rows] for name, tensor in batch.items()} for at in range(0, len(samples), rows)
        ]
        self._trainer.current_gradient_accumulation_steps = len(self._inputs)

    def __call__(self) -> list[Tensor]:
        """Make a step."""
        for inputs in self._inputs:
            self._trainer.compute_loss(self._model, inputs).backward()
        gradients = [-parameter.grad for parameter in self._parameters]
        self._model.zero_grad(set_to_none=True)
        return gradients


def _trainer(model: Any, *, num_rows: int, num_samples: int) -> Any:
    from datasets import Dataset  # type: ignore[import-not-found]
    from transformers import AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer  # type: ignore[import-not-found]

    arguments = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=num_rows,
        num_generations=2,
        gradient_accumulation_steps=1,
        loss_type="grpo",
        beta=0.0,
        epsilon=0.2,
        importance_sampling_level="token",
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=model.device.type == "cpu",
        report_to=[],
    )
    tokenizer = AutoTokenizer.from_pretrained(model.config._name_or_path)
    tokenizer.eos_token = tokenizer.pad_token
    rows = Dataset.from_list([{"prompt": "?"}] * num_samples)
    return GRPOTrainer(model, reward_funcs=lambda **_: [0.0], args=arguments, train_dataset=rows,
                       processing_class=tokenizer)  # fmt: skip


def _padded(samples: Sequence[workload.Sample], device: torch.device) -> dict[str, Tensor]:
    prompts, completions, acted, behavior = [], [], [], []
    for sample in samples:
        at = int(sample.acted_T.nonzero()[0])
        prompts.append(sample.ids_T[:at])
        completions.append(sample.ids_T[at:])
        acted.append(sample.acted_T[at:].long())
        behavior.append(sample.behavior_T[at:].float())
    batch = {
        "prompt_ids": _joined(prompts, "left"),
        "prompt_mask": _joined([torch.ones_like(one) for one in prompts], "left"),
        "completion_ids": _joined(completions, "right"),
        "completion_mask": _joined([torch.ones_like(one) for one in completions], "right"),
        "tool_mask": _joined(acted, "right"),
        "old_per_token_logps": _joined(behavior, "right"),
        "advantages": torch.tensor(workload.advantages(samples)),
    }
    return {name: tensor.to(device) for name, tensor in batch.items()}


def _joined(rows: list[Tensor], side: str) -> Tensor:
    return pad_sequence(rows, batch_first=True, padding_side=side)


if __name__ == "__main__":
    child.main(TrlStep, __doc__)
