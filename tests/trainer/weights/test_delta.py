"""Folders with what changed: the engine's own reader makes the learner's weights of them, to the bit, at any time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from agentrl.config import EngineConfig, LoraConfig
from agentrl.engine.base import is_delta
from agentrl.engine.checksum import checksum_of
from agentrl.engine.vllm import changes, loading
from agentrl.errors import LearnerError, WeightsWanted
from agentrl.types import Probe, WeightsRef
from tests.agentrl.engine.vllm.small_engines import Engine, SmallModel
from tests.trainer.weights.test_publisher import Silent, transfer
from trainer import lora
from trainer.weights.delta import DeltaFolders
from trainer.weights.source import WeightSource
from trainer.weights.transfer import publisher

PROBE = Probe(token_ids=(1, 2, 3), logprobs=(-1.0, -2.0))


class Policy:
    """A small model that takes steps, its source, and the versions that were published."""

    def __init__(self, root: Path, *, whole_every: int = 4, dtype: torch.dtype = torch.bfloat16) -> None:
        self.model = SmallModel().to(dtype)
        self.source = WeightSource(self.model, dtype=dtype)
        self.folders = DeltaFolders(root, whole_every=whole_every)
        self.version = 0

    def step(self, share: float = 0.01) -> None:
        """Change this share of all elements."""
        self.version += 1
        generator = torch.Generator().manual_seed(self.version)
        with torch.no_grad():
            for parameter in self.model.parameters():
                changed = torch.rand(parameter.shape, generator=generator) < share
                parameter[changed] = parameter[changed] * 2 + 1

    def publish(self) -> WeightsRef:
        return self.folders.publish(self.source, policy_version=self.version, probe=PROBE)


def deltas_of(ref: WeightsRef) -> list[Path]:
    return [Path(delta) for delta in ref.update_info.get("deltas", [])]


def read(ref: WeightsRef) -> dict[str, Tensor]:
    """As the engine reads it."""
    assert ref.path is not None
    return dict(changes.changed_tensors(loading.tensors_of(Path(ref.path)), deltas_of(ref)))


def assert_holds(ref: WeightsRef, policy: Policy) -> None:
    found = read(ref)
    for name, parameter in policy.model.named_parameters():
        assert torch.equal(found[name], parameter), name
    assert ref.checksum == checksum_of(found.items())


def test_every_nth_has_all_weights_and_each_gives_the_learners(tmp_path: Path) -> None:
    policy, refs = Policy(tmp_path, whole_every=3), []
    for _ in range(7):
        refs.append(policy.publish())
        assert_holds(refs[-1], policy)
        policy.step()
    assert [len(deltas_of(ref)) for ref in refs] == [0, 1, 2, 0, 1, 2, 0]
    assert refs[1].path == refs[0].path != refs[3].path and deltas_of(refs[2])[0] == deltas_of(refs[1])[0]
    assert [is_delta(ref) for ref in refs[:4]] == [False, True, True, False]
    whole = refs[0].num_bytes
    assert whole == sum(parameter.nbytes for parameter in policy.model.parameters())
    assert all(0 < ref.num_bytes < 0.05 * whole for ref in refs if is_delta(ref))  # 1 %, at 3 times the bytes
    assert refs[5].num_bytes <= sum(file.stat().st_size for file in deltas_of(refs[5])[1].iterdir())


def test_the_folders_of_this_publication_and_the_one_before_stay(tmp_path: Path) -> None:
    policy, refs = Policy(tmp_path, whole_every=3), []
    for _ in range(5):
        refs.append(policy.publish())
        policy.step()
        needed = {Path(str(ref.path)) for ref in refs[-2:]} | {d for ref in refs[-2:] for d in deltas_of(ref)}
        assert set(tmp_path.iterdir()) == needed


def test_what_a_learner_before_published_stays_until_the_engines_have_something_else(tmp_path: Path) -> None:
    before = Policy(tmp_path)
    for _ in range(3):
        held = before.publish()
        before.step()
    after = Policy(tmp_path)
    assert not is_delta(after.publish()), "a new learner has nothing to compare with"
    assert read(held), "an engine could not return to what it holds"
    after.step()
    ref = after.publish()
    assert set(tmp_path.iterdir()) == {Path(str(ref.path)), *deltas_of(ref)}


def test_a_step_that_changes_nothing_is_a_folder_without_tensors(tmp_path: Path) -> None:
    policy = Policy(tmp_path)
    policy.publish()
    ref = policy.publish()
    assert is_delta(ref) and ref.num_bytes == 0
    assert_holds(ref, policy)


def test_changes_that_outgrow_the_weights_are_followed_by_all_weights(tmp_path: Path) -> None:
    """As in float32, where a step changes everything."""
    policy, refs = Policy(tmp_path, whole_every=100, dtype=torch.float32), []
    for _ in range(4):
        refs.append(policy.publish())
        policy.step(share=1.0)
    assert [is_delta(ref) for ref in refs] == [False, True, False, True]
    assert {ref.num_bytes for ref in refs} == {refs[0].num_bytes}


def test_many_changes_are_written_in_several_files(tmp_path: Path) -> None:
    policy = Policy(tmp_path)
    policy.folders = DeltaFolders(tmp_path, whole_every=4, max_shard_bytes=3000)
    policy.publish()
    policy.step(share=0.3)
    ref = policy.publish()
    assert len(list(deltas_of(ref)[0].iterdir())) > 1
    assert_holds(ref, policy)


class Breaking(WeightSource):
    """A source whose pass breaks off when it is told to."""

    breaks = False

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for at, item in enumerate(super().__iter__()):
            if self.breaks and at == 2:
                raise RuntimeError("the other rank died")
            yield item


def test_after_a_write_that_failed_all_weights_are_published(tmp_path: Path) -> None:
    policy = Policy(tmp_path)
    policy.source = source = Breaking(policy.model, dtype=torch.bfloat16)
    first = policy.publish()
    policy.step()
    source.breaks = True
    with pytest.raises(RuntimeError, match="the other rank died"):
        policy.publish()
    assert set(tmp_path.iterdir()) == {Path(str(first.path))}
    source.breaks = False
    ref = policy.publish()
    assert not is_delta(ref) and read(first)
    assert_holds(ref, policy)


def test_all_weights_can_be_written_again_while_the_next_step_is_made(tmp_path: Path) -> None:
    policy = Policy(tmp_path)
    policy.publish()
    policy.step()
    ref, expected = policy.publish(), {name: p.clone() for name, p in policy.model.named_parameters()}
    policy.step()
    again = policy.folders.whole_again()
    assert not is_delta(again) and (again.policy_version, again.checksum) == (ref.policy_version, ref.checksum)
    assert all(torch.equal(read(again)[name], tensor) for name, tensor in expected.items())
    following = policy.publish()
    assert following.path == again.path and len(deltas_of(following)) == 1
    assert_holds(following, policy)


class Answering(Silent):
    """An orchestrator that notes what is published, and raises what it is told to, once each."""

    def __init__(self, *errors: Exception | None) -> None:
        self.errors = list(errors)
        self.refs: list[WeightsRef] = []

    def publish(self, ref: WeightsRef) -> None:
        self.refs.append(ref)
        if self.errors and (error := self.errors.pop(0)) is not None:
            raise error


def sender_of(model: nn.Module, link: Answering, root: Path) -> Any:
    return publisher(
        replace(transfer("safetensors", timeout_s=60), weights_dir=root),
        EngineConfig(weight_delta=8),
        source=WeightSource(model, dtype=torch.bfloat16),
        link=link,
    )


def test_engines_that_cannot_use_the_changes_are_given_all_weights_of_the_same_version(tmp_path: Path) -> None:
    policy, link = Policy(tmp_path), Answering(None, WeightsWanted("other weights came of it"))
    sender = sender_of(policy.model, link, tmp_path)
    for version in (1, 2):
        sender.publish(policy_version=version, probe=PROBE)
        sender.proven()
        policy.step()
    assert [(ref.policy_version, is_delta(ref)) for ref in link.refs] == [(1, False), (2, True), (2, False)]
    assert link.refs[1].checksum == link.refs[2].checksum == checksum_of(read(link.refs[2]).items())


def test_engines_that_refuse_all_weights_too_are_an_error(tmp_path: Path) -> None:
    wanted = WeightsWanted("other weights came of it")
    policy, link = Policy(tmp_path), Answering(None, wanted, LearnerError("the orchestrator answered 503"))
    sender = sender_of(policy.model, link, tmp_path)
    sender.publish(policy_version=1, probe=PROBE)
    sender.publish(policy_version=2, probe=PROBE)
    with pytest.raises(LearnerError, match="503"):
        sender.proven()


def test_an_engine_that_was_restarted_is_given_all_weights(tmp_path: Path) -> None:
    policy, link = Policy(tmp_path), Answering()
    sender = sender_of(policy.model, link, tmp_path)
    sender.publish(policy_version=1, probe=PROBE)
    sender.reopen()
    sender.publish(policy_version=1, probe=PROBE)
    sender.proven()
    assert [is_delta(ref) for ref in link.refs] == [False, False]


@pytest.mark.parametrize("tensor_parallel", [1, 2])
def test_an_engine_takes_changes_from_whatever_it_holds(tmp_path: Path, tensor_parallel: int) -> None:
    """In vLLM's own layerwise reload, here over a small model; each worker reads the folders by itself."""
    from agentrl.engine.vllm.safetensors import SafetensorsEngine

    (tmp_path / "model").mkdir()
    policy = Policy(tmp_path, dtype=torch.float32)
    first, late = (Engine(SafetensorsEngine, tmp_path / "model", tensor_parallel=tensor_parallel) for _ in range(2))
    for _ in range(3):
        ref = policy.publish()
        first.update(ref.update_info)
        assert first.checksums == {ref.checksum} and first.is_whole
        assert all(torch.equal(first.weights()[name], p) for name, p in policy.model.named_parameters())
        policy.step(share=0.2)
    late.update(ref.update_info)
    assert late.checksums == {ref.checksum}


def test_damaged_changes_do_not_have_the_checksum(tmp_path: Path) -> None:
    from agentrl.engine.vllm.safetensors import SafetensorsEngine

    (tmp_path / "model").mkdir()
    policy = Policy(tmp_path, dtype=torch.float32)
    engine = Engine(SafetensorsEngine, tmp_path / "model")
    engine.update(policy.publish().update_info)
    policy.step()
    ref = policy.publish()
    file = next(deltas_of(ref)[0].iterdir())
    damaged = load_file(file)
    next(tensor for name, tensor in damaged.items() if name.startswith("values:"))[0] += 1
    save_file(damaged, file)
    engine.update(ref.update_info)
    assert engine.checksums != {ref.checksum}
    engine.update(policy.folders.whole_again().update_info)
    assert engine.checksums == {ref.checksum}


def test_changes_that_are_missing_or_of_another_model_leave_the_old_weights(tmp_path: Path) -> None:
    from agentrl.engine.vllm.safetensors import SafetensorsEngine

    (tmp_path / "model").mkdir()
    policy = Policy(tmp_path, dtype=torch.float32)
    engine = Engine(SafetensorsEngine, tmp_path / "model")
    ref = policy.publish()
    engine.update(ref.update_info)
    (tmp_path / "nothing").mkdir()
    engine.each("start_weight_update")
    with pytest.raises(FileNotFoundError, match="nothing"):
        engine.each("update_weights", {"path": ref.path, "deltas": [str(tmp_path / "nothing")]})
    assert engine.checksums == {ref.checksum} and engine.is_whole


def adapted(model: Any) -> Any:
    """The tiny policy with adapters."""
    return lora.with_adapters(model, LoraConfig(rank=2, alpha=4))


def train(model: Any, seed: int) -> None:
    """Other adapters."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)


def is_merged(ref: WeightsRef, source: WeightSource) -> bool:
    """Whether an engine gets the weights with their adapters of it, to the bit."""
    found, expected = read(ref), dict(source)
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_of_a_policy_with_adapters_only_these_travel(tiny_model: Any, tmp_path: Path, dtype: torch.dtype) -> None:
    model = adapted(tiny_model.to(dtype))
    source, folders, refs = WeightSource(model, dtype=dtype), DeltaFolders(tmp_path, whole_every=4), []
    for version in range(6):
        refs.append(folders.publish(source, policy_version=version, probe=PROBE))
        assert is_merged(refs[-1], source) and refs[-1].checksum == checksum_of(source)
        train(model, version)
    matrices = [parameter for name, parameter in model.named_parameters() if "lora_" in name]
    adapter_bytes = sum(matrix.nbytes for matrix in matrices) + 8 * len(matrices) // 2  # each with its scale
    assert [ref.num_bytes for ref in refs] == [
        source.num_bytes + adapter_bytes,
        *[adapter_bytes] * 3,
        source.num_bytes + adapter_bytes,
        adapter_bytes,
    ]
    assert [len(deltas_of(ref)) for ref in refs] == [1] * 6
    assert len({ref.path for ref in refs[:4]}) == 1 and refs[4].path != refs[3].path
    assert len(list(tmp_path.iterdir())) == 3  # all weights, and the adapters of two versions


def test_engines_that_merge_adapters_another_way_are_given_merged_weights_from_then_on(
    tiny_model: Any, tmp_path: Path
) -> None:
    model = adapted(tiny_model)
    source, folders = WeightSource(model, dtype=torch.float32), DeltaFolders(tmp_path, whole_every=4)
    folders.publish(source, policy_version=0, probe=PROBE)
    again = folders.whole_again()
    assert not is_delta(again) and is_merged(again, source)
    train(model, 1)
    following = folders.publish(source, policy_version=1, probe=PROBE)
    assert following.path == again.path and is_merged(following, source)
    assert not any("down:" in name for name in load_file(deltas_of(following)[0] / "delta-00001.safetensors"))
