"""The page on objectives of one's own, block by block, and the number that its test differentiates."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
import torch

from agentrl.config import parse
from agentrl.config.algorithm import AlgorithmConfig
from agentrl.config.presets import OPTIMAL, PRESETS
from tests.trainer.softmax_policy import groups, objective_gradient, policy
from trainer.objective import Sample, make_objective, surrogate

PAGE = Path(__file__).parents[3] / "docs" / "write-an-objective.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE.read_text(), flags=re.MULTILINE | re.DOTALL)


def test_the_rule_of_the_page_passes_its_test_and_its_config_finds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = blocks("python")
    for source in sources:
        (tmp_path / source.splitlines()[0].removeprefix("# ")).write_text(source)
    assert sum(len(source.splitlines()) for source in sources) <= 42
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    runpy.run_path("test_asymre.py")["test_the_gradient_is_that_of_the_papers_loss"]()
    import yaml

    (section,) = blocks("yaml")
    tree = {"name": "n", "env": {"target": "x:Y"}, "model": {"path": "m"}, **yaml.safe_load(section)}
    found = make_objective(parse(tree, source="page").algorithm)
    assert (type(found).__name__, vars(found)["below"]) == ("AsymRE", 0.2)


@pytest.mark.parametrize("preset", [name for name in PRESETS if AlgorithmConfig(preset=name).baseline not in OPTIMAL])
def test_its_gradient_is_that_of_the_step(preset: str) -> None:
    theta, algorithm = policy(), AlgorithmConfig.model_validate({"preset": preset})
    batch = groups(theta, off_policy=0.4)
    samples = [
        [
            Sample(
                logits_NV=theta[one.states],
                token_N=one.actions,
                behavior_logprob_N=one.behavior,
                reward=one.reward,
                reference_logprob_N=one.reference,
            )
            for one in members
        ]
        for members in batch
    ]
    (ours,) = torch.autograd.grad(surrogate(make_objective(algorithm), samples), theta)
    torch.testing.assert_close(ours, objective_gradient(theta, batch, algorithm), rtol=1e-12, atol=1e-14)


def test_a_rule_with_norms_is_refused() -> None:
    with pytest.raises(ValueError, match="PolicyGradient needs score norms"):
        surrogate(make_objective(AlgorithmConfig()), [])
