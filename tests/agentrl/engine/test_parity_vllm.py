"""What the probe refuses and lets pass, on a real bfloat16 server whose model has logits like a trained one's."""

from __future__ import annotations

import copy
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from agentrl.engine.base import parity
from agentrl.engine.parity import MEAN_BOUNDS
from agentrl.engine.vllm_engine import VLLMEngine
from agentrl.engine.weight_updates import UpdateSettings
from agentrl.errors import WeightSyncError
from agentrl.types import Probe, WeightsRef
from tests.agentrl.engine import gpu_scheduling
from tests.conftest import VLLMServer, serving_tiny_model
from tests.device import engine_device
from trainer.gpu_report import random_models as models

pytestmark = [pytest.mark.engine, pytest.mark.slow]

SHAPE = models.Shape(hidden_size=128, intermediate_size=256, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=32)
TEXT = tuple((7 * i) % SHAPE.vocab_size for i in range(64))
BOUND = MEAN_BOUNDS["cpu", "bfloat16"]


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Two tied bfloat16 models, and others made of them."""
    first, second = (models.make("Qwen3", SHAPE, tied=True, dtype="bfloat16", seed=seed) for seed in (1, 2))
    one_layer, permuted, nearby, offset = (copy.deepcopy(first) for _ in range(4))
    one_layer.model.layers[1].load_state_dict(second.model.layers[1].state_dict())
    head = permuted.get_output_embeddings().weight
    head.data = head.data.roll(1, dims=0)
    models.disturb(nearby, scale=0.003, seed=3)
    # One vector added to all rows of a head changes no probability, but logits that are large are rounded coarsely.
    offset.get_output_embeddings().weight.data.add_(torch.tensor([0.5, -0.5]).repeat(SHAPE.hidden_size // 2))
    named = {"one layer": one_layer, "permuted head": permuted, "nearby": nearby, "offset": offset}
    return {"first": first, "second": second, **named}


@pytest.fixture(scope="module")
def folders(policies: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("policies")
    return {name: models.save(model, root / name.replace(" ", "-")) for name, model in policies.items()}


@pytest.fixture(scope="module")
def bfloat16_server(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[VLLMServer]:
    """As on a GPU: with Model Runner V2, which a CPU gets only here."""
    folder = tmp_path_factory.mktemp("bfloat16")
    variables = gpu_scheduling.environment(folder / "site") if engine_device() == "cpu" else {}
    with serving_tiny_model(folders["first"], folder, dtype="bfloat16", **variables) as server:
        yield server


@pytest.fixture(params=[False, True], ids=["safetensors", "reload"])
def by_folder(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
async def engine(by_folder: bool, bfloat16_server: VLLMServer) -> AsyncIterator[VLLMEngine]:
    settings = UpdateSettings(parity_bound=BOUND, by_folder=by_folder)
    async with VLLMEngine(bfloat16_server.url, model=bfloat16_server.model, updates=settings) as engine:
        yield engine


Ref = Callable[..., WeightsRef]


@pytest.fixture
def ref(policies: dict[str, Any], folders: dict[str, Path]) -> Ref:
    """The weights of `held` with the probe of `said`."""

    def made(version: int, held: str, said: str, checksum: str = "") -> WeightsRef:
        probe = Probe(token_ids=TEXT, logprobs=tuple(models.logprobs(policies[said], TEXT)))
        info = {"path": str(folders[held])}
        return WeightsRef(policy_version=version, num_bytes=1, update_info=info, checksum=checksum, probe=probe)

    return made


async def test_a_tied_head_is_renewed_with_each_update(engine: VLLMEngine, ref: Ref) -> None:
    """Were a float32 copy of the head kept, the new weights would be refused."""
    version = await engine.version()
    for step, name in enumerate(("second", "permuted head", "first"), start=1):
        update = await engine.update_weights(ref(version + step, name, name))
        assert update.parity is not None and update.parity.mean_abs < BOUND / 2


@pytest.mark.parametrize("wrong", ["second", "one layer", "permuted head"])
async def test_wrong_weights_are_off_by_nats_and_refused(engine: VLLMEngine, ref: Ref, wrong: str) -> None:
    version = await engine.version()
    with pytest.raises(WeightSyncError, match="does not hold the learner's weights"):
        await engine.update_weights(ref(version + 1, wrong, "first"))


async def test_rounding_hides_a_small_step_from_the_probe_but_not_from_the_checksum(
    engine: VLLMEngine, by_folder: bool, ref: Ref, policies: dict[str, Any]
) -> None:
    from agentrl.engine.checksum import checksum_of
    from trainer.weights.source import WeightSource

    version = await engine.version()
    update = await engine.update_weights(ref(version + 1, "nearby", "first"))
    assert update.parity is not None and update.parity.mean_abs < BOUND
    if by_folder:
        return  # reload_weights has no checksum
    checksum = checksum_of(WeightSource(policies["first"], dtype=policies["first"].dtype))
    with pytest.raises(WeightSyncError, match="took other weights than the learner sent"):
        await engine.update_weights(ref(version + 2, "nearby", "first", checksum))


async def test_logits_are_those_of_a_float32_head(engine: VLLMEngine, ref: Ref, policies: dict[str, Any]) -> None:
    await engine.update_weights(ref(await engine.version() + 1, "offset", "offset"))
    texts = [tuple((step * i + 3) % SHAPE.vocab_size for i in range(400)) for step in (5, 11, 13)]
    ours = [value for text in texts for value in await engine.score(text)]
    exact, rounded = (
        parity(ours, [v for text in texts for v in models.logprobs(policies["offset"], text, float32_head=float32)])
        for float32 in (True, False)
    )
    assert exact.kl < 0.5 * rounded.kl
