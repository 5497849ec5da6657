"""The division of a GPU between engine and learner, with numbers worked by hand, and the size of a model."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.config import EngineConfig
from agentrl.engine import memory
from agentrl.engine.model_size import model_size
from agentrl.errors import ConfigError
from tests.agentrl.training.troubles import Trouble

GIB = 2**30
NO_CACHE = Trouble(
    "engine.gpu_memory_fraction=... leaves no KV cache: the weights take ... GB, and about ... GB go to activations "
    "and CUDA."
)
H100 = 85 * 10**9


@pytest.mark.parametrize(
    ("settings", "is_shared", "fraction"),
    [
        ({}, False, 0.9),
        ({}, True, 0.3),
        ({"sleep_while_training": True}, True, 0.5),
        ({"sleep_while_training": True}, False, 0.9),
        ({"gpu_memory_fraction": 0.42}, True, 0.42),
        ({"gpu_memory_fraction": 0.42}, False, 0.42),
    ],
)
def test_the_share_of_an_engine(settings: dict[str, float], is_shared: bool, fraction: float) -> None:
    assert memory.engine_fraction(EngineConfig(**settings), is_shared=is_shared) == fraction  # type: ignore[arg-type]


def test_weights_and_work_come_before_the_cache() -> None:
    # 0.3 * 85 GB = 25.5; a tenth of that and 1.07 GB for CUDA and activations; 3.4 GB of weights: 18.48 are left.
    left = memory.kv_cache_bytes(EngineConfig(), total_bytes=H100, weights_bytes=3_400_000_000)
    assert left == round(0.9 * 0.3 * H100) - GIB - 3_400_000_000 == 18_476_258_176
    assert memory.kv_cache_bytes(EngineConfig(kv_cache_bytes=7), total_bytes=None, weights_bytes=None) == 7


@pytest.mark.parametrize(
    ("total", "weights", "reason"),
    [
        (None, 1, "size of the GPU's memory is not known: set engine.kv_cache_bytes"),
        (1, None, "size of the model's weights is not known: set engine.kv_cache_bytes"),
        (H100, 24 * 10**9, r"fraction=0\.3 of a GPU of 85 GB leaves no KV cache: the weights take 24 GB"),
    ],
)
def test_a_cache_that_cannot_be_computed_names_what_to_set(total: int | None, weights: int | None, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as found:
        memory.kv_cache_bytes(EngineConfig(), total_bytes=total, weights_bytes=weights)
    assert total is None or weights is None or NO_CACHE.is_in(found.value)


def test_a_cache_of_a_given_size_stays_within_the_engine_s_share() -> None:
    """The learner's cap is what the share leaves."""

    def cache(kv_cache_bytes: int) -> int:
        config = EngineConfig(kv_cache_bytes=kv_cache_bytes)
        return memory.kv_cache_bytes(config, total_bytes=H100, weights_bytes=3_400_000_000)

    assert cache(18_476_258_176) == 18_476_258_176
    with pytest.raises(ConfigError, match=r"kv_cache_bytes=18476258177.*leaves 18476258176 for it"):
        cache(18_476_258_177)


@pytest.mark.parametrize("settings", [{}, {"sleep_while_training": True}, {"gpu_memory_fraction": 0.6}])
def test_both_fit_on_the_gpu(settings: dict[str, float]) -> None:
    config = EngineConfig(**settings)  # type: ignore[arg-type]
    weights = 3_400_000_000
    engine = weights + memory.kv_cache_bytes(config, total_bytes=H100, weights_bytes=weights)
    awake = memory.learner_fraction(config, total_bytes=H100, engine_sleeps=False)
    assert engine + memory.ENGINE_BASE_BYTES + awake * H100 + memory.OUTSIDE_BYTES < H100
    asleep = memory.learner_fraction(config, total_bytes=H100, engine_sleeps=True)
    assert asleep > awake and asleep * H100 + memory.ASLEEP_BYTES + memory.OUTSIDE_BYTES <= H100
    # What must be free at a restart is far less than what the learner leaves.
    assert memory.checked_fraction(total_bytes=H100, weights_bytes=weights) < 0.05 < 1 - awake


def test_an_engine_that_leaves_the_learner_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"gpu_memory_fraction=0\.99 leaves the learner nothing"):
        memory.learner_fraction(EngineConfig(gpu_memory_fraction=0.99), total_bytes=H100, engine_sleeps=False)


def test_a_model_is_measured_by_the_headers_of_its_files(tiny_model_dir: Path, tmp_path: Path) -> None:
    size = model_size(str(tiny_model_dir))
    assert size is not None and size.num_bytes == (tiny_model_dir / "model.safetensors").stat().st_size
    assert 0 < 4 * size.num_parameters < size.num_bytes
    assert model_size(str(tmp_path)) is None
    assert model_size("nobody/has-this-model") is None
