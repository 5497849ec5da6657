"""The bounds of an update's probe, by device and dtype, and what rounding costs in sequence weights."""

import logging
import math
from dataclasses import replace
from typing import Any

import pytest

from agentrl.config import parse
from agentrl.engine import vllm_command
from agentrl.engine.base import parity
from agentrl.engine.parity import LogRatio, ParityBounds, log_ratio_at, mean_bound
from agentrl.engine.vllm_engine import VLLMEngine
from agentrl.engine.weight_updates import UpdateSettings
from agentrl.errors import WeightSyncError
from agentrl.testing import ScriptedEngine
from agentrl.tokens.tokenizer import TurnTokenizer
from agentrl.types import Probe, SumSigma
from tests.agentrl.engine.test_weight_updates import ref
from tests.agentrl.engine.vllm_double import vllm_double


def off_by(*differences: float) -> Any:
    return parity([-5.0] * len(differences), [-5.0 + one for one in differences])


def test_the_mean_refuses_and_the_largest_only_warns() -> None:
    bounds = ParityBounds(0.15)
    assert not bounds.refuses(off_by(*[0.1] * 63)) and not bounds.warns(off_by(*[0.1] * 63))
    assert bounds.refuses(off_by(*[0.16] * 63))
    outlier = off_by(1.0, *[0.03] * 62)
    assert not bounds.refuses(outlier) and bounds.warns(outlier)


def test_a_few_tokens_that_are_nats_off_are_refused_by_their_kl() -> None:
    found = off_by(3.0, 3.0, *[0.01] * 61)
    assert found.mean_abs < 0.15 and ParityBounds(0.15).refuses(found)


def test_a_nan_is_refused() -> None:
    assert ParityBounds(0.15).refuses(parity([math.nan, -1.0], [-1.0, -1.0]))


def config(dtype: str, **engine: Any) -> Any:
    tree = {"name": "t", "env": {"target": "envs.modmath:ModMath"}, "model": {"path": "m", "dtype": dtype}}
    return parse({**tree, "engine": engine}, source="test")


@pytest.mark.parametrize(
    ("device", "dtype", "bound"),
    [("cpu", "float32", 1e-4), ("cuda", "float32", 2e-2), ("cpu", "bfloat16", 0.15), ("cuda", "bfloat16", 0.15)],
)
def test_the_bound_is_that_of_device_and_dtype(
    monkeypatch: pytest.MonkeyPatch, device: str, dtype: str, bound: float
) -> None:
    monkeypatch.setattr(vllm_command, "device_of", lambda settings: device)
    assert mean_bound(config(dtype)) == bound
    assert mean_bound(config(dtype, parity_bound=0.3)) == 0.3


def test_servers_elsewhere_may_have_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_command, "device_of", lambda settings: pytest.fail("it is not of this machine"))
    assert mean_bound(config("float32", url="http://a:1")) == 2e-2
    assert mean_bound(config("float32", url="http://a:1", device="cpu")) == 1e-4


async def test_an_update_with_one_outlier_is_taken_and_logged_and_one_that_is_off_is_refused(
    tokenizer: TurnTokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    settings = UpdateSettings(parity_bound=0.15)
    async with (
        vllm_double(ScriptedEngine(tokenizer=tokenizer, script=lambda prompt: "yes")) as double,
        VLLMEngine(double.url, updates=settings) as engine,
    ):
        first = ref(1)  # the double scores each token alike: -2 under version 1
        outlier = Probe(token_ids=tuple(range(64)), logprobs=(-1.0, *[-2.0] * 62))
        with caplog.at_level(logging.WARNING):
            update = await engine.update_weights(replace(first, probe=outlier))
        assert update.metrics()["engine/parity_max_abs"] == 1.0
        assert "differs by 1 nats from the learner's, usual is at most 0.5" in caplog.text
        double.skew = -0.2
        with pytest.raises(WeightSyncError, match=r"differ by 0\.2 on average \(KL 0\.021\), allowed is 0\.15"):
            await engine.update_weights(ref(2))


def test_sums_grow_with_the_root_of_their_length() -> None:
    measured = [SumSigma(length=1, sigma=0.03, num_sums=9000), SumSigma(length=256, sigma=0.6, num_sums=20)]
    assert log_ratio_at(256, measured) == LogRatio(length=256, sigma=0.6, is_measured=True)
    assert log_ratio_at(1024, measured) == LogRatio(length=1024, sigma=1.2, is_measured=False)
    assert log_ratio_at(1024, measured[:1]) == LogRatio(length=1024, sigma=0.96, is_measured=False)
    assert log_ratio_at(256, []) is None


def test_rho_is_that_of_normal_log_weights() -> None:
    import torch

    from trainer.objective.vcpo import ess_ratio

    log_weight_B = 0.8 * torch.randn(200_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rho = LogRatio(length=1, sigma=0.8, is_measured=True).rho
    assert rho == pytest.approx(float(ess_ratio(log_weight_B)), rel=0.02)


def test_the_spread_is_measured_over_blocks_in_a_row() -> None:
    from tests.trainer.test_diagnostics import group, stats
    from trainer import diagnostics

    blocks = [(1.0, -1.0, 2.0, 0.0, 5.0), (0.0, 0.0, 0.0, 0.0), (3.0,), (1.0, 1.0, 1.0, 1.0)]
    long = [stats(num_parity_tokens=256 * len(one), parity_blocks=one, parity_square_sum=1.0) for one in blocks]
    single, short, *more = diagnostics.parity_sigmas([group(*long)])
    assert (single.length, single.num_sums) == (1, 256 * 14) and single.sigma == pytest.approx((4 / 3584) ** 0.5)
    assert (short.length, short.num_sums) == (256, 14)
    assert more == []  # three sums of 1024 tokens are too few
    assert diagnostics.parity_sigmas([group(stats())]) == ()


def test_only_whole_blocks_are_summed() -> None:
    import torch

    from trainer.gradient.scored import _block_sums

    assert _block_sums(torch.ones(600, dtype=torch.float64)) == (256.0, 256.0)
    assert _block_sums(torch.ones(255)) == ()
