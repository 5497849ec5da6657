"""Run by test_transfer.py as the learner's process: sends the weights of a folder to the orchestrator's engines.

Its one argument is JSON: model_dir, url, backend, weights_dir, timeout_s, stages (one ZeRO stage a version; -1: plain),
stall_at (stop for stall_s before the n-th tensor is sent, and say so; -1: never), old_dir (a model that is sent before,
at leisure; null: none), version (the first). Backend nccl goes over tests/fake_nccl.py.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from gathering_ranks import under_zero
from torch import Tensor, distributed
from transformers import AutoModelForCausalLM

from agentrl.config import EngineConfig
from agentrl.errors import AgentRLError, WeightsWanted
from agentrl.types import Probe
from tests import fake_nccl
from trainer import ranks
from trainer.orchestrator_client import OrchestratorClient
from trainer.process_end import end_process
from trainer.weights.publisher import Publisher, TransferSettings
from trainer.weights.source import WeightSource
from trainer.weights.transfer import publisher

PROBE_IDS = tuple(range(20, 60))


class StallingSource(WeightSource):
    """Hangs before its n-th tensor in the pass that sends; the pass before makes the checksum."""

    stall_at, stall_s = -1, 0.0
    num_passes = 0

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        self.num_passes += 1
        for at, pair in enumerate(super().__iter__()):
            if self.num_passes == 2 and at == self.stall_at:
                sys.stdout.write("stalled\n")
                sys.stdout.flush()
                time.sleep(self.stall_s)
            yield pair


def probe_of(model: Any) -> Probe:
    with torch.no_grad():
        logits_TV = model(input_ids=torch.tensor([PROBE_IDS]), use_cache=False).logits[0]
    ids_T1 = torch.tensor(PROBE_IDS)[1:, None]
    logprobs = logits_TV[:-1].float().log_softmax(-1).gather(1, ids_T1)[:, 0].tolist()
    return Probe(token_ids=PROBE_IDS, logprobs=tuple(logprobs))


def send(sender: Publisher, version: int, probe: Probe) -> None:
    while True:
        try:
            sender.publish(policy_version=version, probe=probe)
            sender.proven()
            return
        except WeightsWanted:
            sender.reopen()


def main(task: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    if task["backend"] == "nccl":
        fake_nccl.plugin()
    ranks.join(timeout_s=60)
    link = OrchestratorClient(task["url"], token="secret", publish_timeout_s=150, gone_after_s=2)
    transfer = TransferSettings(
        backend=task["backend"],
        rank=distributed.get_rank(),
        weights_dir=Path(task["weights_dir"]),
        timeout_s=150,
    )
    old = [(task["old_dir"], -1, -1, 60.0)] if task["old_dir"] else []
    new = [(task["model_dir"], stage, task["stall_at"], task["timeout_s"]) for stage in task["stages"]]
    for version, (model_dir, stage, stall_at, timeout_s) in enumerate([*old, *new], start=task["version"]):
        settings = EngineConfig(update_timeout_s=timeout_s)
        model = AutoModelForCausalLM.from_pretrained(model_dir, dtype="float32").eval()
        if stage >= 0:
            model = under_zero(model, stage).module
        source = StallingSource(model, dtype=torch.float32)
        source.stall_at, source.stall_s = stall_at, task["stall_s"]
        sender = publisher(transfer, settings, source=source, link=link)
        try:
            send(sender, version, probe_of(model))
        finally:
            sender.close()
    distributed.destroy_process_group()


if __name__ == "__main__":
    ranks.set_defaults(os.environ)
    try:
        main(json.loads(sys.argv[1]))
    except AgentRLError as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        end_process(1)
    end_process()
