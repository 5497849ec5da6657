"""The toy's arithmetic: episodes and verdicts, and that a run computed among others equals the same run alone."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks import calculator, stability_train
from benchmarks.calculator import MAX_TOKENS, PROMPT_TOKENS, Policy
from benchmarks.stability_pictures import draw, fate
from benchmarks.stability_policy import stacked
from benchmarks.stability_report import has_collapsed, has_fallen, steps_to, tables
from benchmarks.stability_rollout import Episodes, rollout
from benchmarks.stability_rules import RULES
from benchmarks.stability_train import GROUP_SIZE, Spec, Stack, Step
from trainer.objective import Group, Member, calls, make_objective, vcpo

LR = 1e-3


def untrained(seed: int) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    return {name: value.detach() for name, value in Policy().state_dict().items()}


@pytest.fixture(autouse=True)
def _cheap_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stability_train, "warm_start", untrained)
    torch.set_num_threads(1)


@pytest.mark.parametrize(("turn", "reward"), [("A158$", 1.0), ("A157$", 0.0), ("$", 0.0), ("158$", 0.0)])
def test_only_the_right_answer_is_rewarded(turn: str, reward: float) -> None:
    assert calculator.reward(turn, [11, 49, 98]) == reward


@pytest.mark.parametrize(("call", "reply"), [("C11+49;", "R60;"), ("C999+2;", "R1;"), ("C11;", "R.;"), (";", "R.;")])
def test_the_calculator_answers_calls_only(call: str, reply: str) -> None:
    assert calculator.reply(call) == reply


def some_episodes(weights: list[dict[str, Tensor]], group_size: int = 4) -> tuple[Episodes, list[list[list[int]]]]:
    generator = torch.Generator().manual_seed(0)
    operands = [calculator.tasks(2, generator) for _ in weights]
    uniform = torch.rand(len(weights), 2 * group_size, MAX_TOKENS, generator=generator)
    return rollout(stacked(weights), operands, uniform, group_size), operands


def test_sampled_logprobs_are_the_policys_own() -> None:
    weights = [untrained(0), untrained(1)]
    episodes, _ = some_episodes(weights)
    policy = Policy()
    for s, own in enumerate(weights):
        policy.load_state_dict(own)
        ids = torch.from_numpy(episodes.ids_SUT[s])
        logprob = policy(ids)[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0].detach().numpy()
        acted = episodes.acted_SUT[s, :, 1:] & (episodes.group_SU[s] >= 0)[:, None]
        assert acted.any()
        np.testing.assert_allclose(episodes.logprob_SUT[s, :, 1:][acted], logprob[acted], atol=2e-5)


def test_every_finished_call_is_answered_and_the_answer_is_no_action() -> None:
    # A policy that always says ";" after its prompt: every turn is an empty call.
    weights = untrained(0)
    weights["head.weight"] = torch.zeros_like(weights["head.weight"])
    weights["head.bias"] = torch.full_like(weights["head.bias"], -50.0)
    weights["head.bias"][calculator.INDEX[";"]] = 50.0
    episodes, operands = some_episodes([weights])
    text = calculator.text(episodes.ids_SUT[0, 0])
    assert text.startswith(calculator.prompt(operands[0][0]) + ";R.;;R.;")
    assert episodes.acted_SUT[0, 0, PROMPT_TOKENS : PROMPT_TOKENS + 8].tolist() == [True, False, False, False] * 2
    assert episodes.ids_SUT.shape[1] == 2  # eight episodes, two distinct


def test_what_a_run_samples_does_not_depend_on_the_runs_beside_it() -> None:
    specs = [Spec(rule="tis", lag=1, seed=seed, lr=LR, num_steps=3) for seed in (0, 1, 2)]
    together, alone = Stack(specs), Stack(specs[1:2])
    together.run()
    alone.run()
    torch.testing.assert_close(together.weight_SP[1], alone.weight_SP[0], rtol=0, atol=2e-6)


Row = tuple[Tensor, Tensor, Tensor]  # token ids, which are actions, their log-probabilities when sampled


class PlainRun:
    """One backward an episode, one after the other, and torch's own AdamW."""

    def __init__(self, rule: str, weights: dict[str, Tensor]) -> None:
        self.rule, self.objective, self.policy = RULES[rule], make_objective(RULES[rule].algorithm), Policy()
        self.policy.load_state_dict(weights)
        self.optimizer = torch.optim.AdamW(self.policy.parameters(), lr=LR, weight_decay=0.0)

    def step(self, rows: list[Row], reward_B: Tensor) -> None:
        logprobs = [self.logprobs(row) for row in rows]
        ratios = [own.detach().double() - mu[acted] for own, (_, acted, mu) in zip(logprobs, rows, strict=True)]
        length_B, advantage_B = torch.ones(len(rows)), torch.zeros(len(rows)).double()
        for start in range(0, len(rows), GROUP_SIZE):
            part = slice(start, start + GROUP_SIZE)
            num_actions = torch.tensor([len(ratio) for ratio in ratios[part]])
            length_B[part] = self.objective.lengths(num_actions).float()
            advantage = self.objective.advantages(Group(reward_E=reward_B[part], num_actions_E=num_actions))
            if advantage is not None:
                advantage_B[part] = advantage - self.shift(logprobs[part], ratios[part], reward_B[part])
        members = [
            Member(log_ratio_N=ratio, advantage=float(advantage), reward=0.0, group=0)
            for ratio, advantage in zip(ratios, advantage_B, strict=True)
        ]
        weights = calls.weigh(self.objective, members)
        self.optimizer.zero_grad()
        for own, used, scale in zip(logprobs, weights, (advantage_B / length_B).tolist(), strict=True):
            (-(own * used.weight_N.float()).sum() * scale / len(rows)).backward()
        rho = float(vcpo.ess_ratio(torch.tensor([used.log_weight for used in weights])))
        torch.nn.utils.clip_grad_norm_(self.policy.parameters(), 1.0)
        self.optimizer.param_groups[0]["lr"] = LR * vcpo.step_scale(rho, 1.0, self.rule.algorithm.step_scale)
        self.optimizer.step()

    def logprobs(self, row: Row) -> Tensor:
        ids_T, acted_T, _ = row
        logprob_TV: Tensor = self.policy(ids_T[None])[0, :-1].log_softmax(-1)
        return logprob_TV.gather(1, ids_T[1:, None])[:, 0][acted_T[1:]]

    def shift(self, logprobs: list[Tensor], ratios: list[Tensor], reward_G: Tensor) -> float:
        if not self.objective.needs_norms:
            return 0.0
        parameters = list(self.policy.parameters())
        gradients = [torch.autograd.grad(own.mean(), parameters, retain_graph=True) for own in logprobs]
        norm_G = torch.stack([torch.cat([g.flatten() for g in one]).norm() for one in gradients])
        members = [Member(log_ratio_N=ratio, advantage=0.0, reward=0.0, group=0) for ratio in ratios]
        used_G = torch.tensor([used.log_used for used in calls.weigh(self.objective, members)])
        optimum = self.objective.baseline(used_G, norm_G, reward_G)
        assert optimum is not None
        return float(optimum - reward_G.mean())


@pytest.mark.parametrize("rule", ["opob", "zero", "grpo", "m2po"])
def test_a_run_among_others_equals_the_plain_way(rule: str) -> None:
    """Steps on episodes of the first weights, with rewards of our own: most groups mixed, one without spread."""
    stack = Stack([Spec(rule=rule, lag=0, seed=seed, lr=LR, num_steps=2) for seed in (3, 4)])
    plain, generators = PlainRun(rule, untrained(4)), [torch.Generator().manual_seed(seed) for seed in (3, 4)]
    first = stack.weight_SP.clone()
    for _ in range(2):
        episodes = stability_train.sampled(first, generators)
        episodes.reward_SU[:] = np.arange(episodes.reward_SU.shape[1]) % 3 == 0
        episodes.reward_SU[episodes.group_SU == 2] = 1.0
        stack.update(episodes)
        kept = [episodes.ids_SUT[1], episodes.acted_SUT[1], episodes.logprob_SUT[1]]
        rows = [(ids, acted, mu) for ids, acted, mu in zip(*(torch.from_numpy(k) for k in kept), strict=True)]
        of_episodes = [rows[row] for row in episodes.row_SB[1]]
        plain.step(of_episodes, torch.from_numpy(episodes.reward_SB[1]).double())
    moved = stack.weight_SP[1] - first[1]
    theirs = stacked([plain.policy.state_dict()])[0] - first[1]
    # AdamW's first steps magnify the signs of gradients that are zero except for rounding.
    assert float((moved - theirs).norm() / theirs.norm()) < 2e-3


def curve(*levels: float) -> list[float]:
    return list(itertools.chain.from_iterable([level] * 20 for level in levels))


def test_verdicts() -> None:
    fell = {"curve": curve(0.4, 0.92, 0.4, 0.9), "accuracy": 0.9}
    assert has_fallen(fell) and not has_collapsed(fell) and steps_to(fell) == 40
    lost = {"curve": curve(0.4, 0.8, 0.5), "accuracy": 0.39}
    assert has_collapsed(lost) and not has_fallen(lost) and steps_to(lost) is None


def finished(rule: str, seed: int, levels: tuple[float, ...], **changed: object) -> dict[str, Any]:
    steps = {name: [0.25] * 80 for name in Step.__dataclass_fields__}
    values = {"curve": curve(*levels), "accuracy": levels[-1], "steps": steps, "then": None, "switch_at": 0}
    return {"rule": rule, "lag": 8, "seed": seed, "lr": LR, "num_steps": 80, **values, **changed}


def test_the_table_has_medians_ranges_and_counts() -> None:
    runs = [finished("opob", 0, (0.4, 0.92, 0.4, 0.3)), finished("opob", 1, (0.4, 0.92, 0.92, 0.95))]
    line = next(line for line in tables(runs).splitlines() if "`opob`" in line)
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells[1:4] == ["2", "1", "1"]
    assert cells[4] == "0.62 (0.30 to 0.95)"
    assert cells[5] == "0.61 (0.30 to 0.92)"
    assert cells[6] == "40"


def test_a_capped_run_stands_beside_the_whole_one() -> None:
    whole = finished("opob", 0, (0.4, 0.92, 0.4, 0.3))
    capped = finished("opob", 0, (0.4, 0.92, 0.92, 0.9), then="opob_safe", switch_at=10)
    assert "| `opob` lag 8 seed 0 | 10 | 0.30, 0.30 | 0.66, 0.90 |  |" in tables([whole, capped])


def test_pictures_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    runs = [finished(rule, 0, (0.4, 0.92, 0.4, 0.3)) for rule in ("opob", "zero")]
    curves, fates = draw(runs, tmp_path)
    assert "lr 0.001" in curves.read_text() and "opob (1)" in fates.read_text()


def test_a_fate_is_b_star_first_and_the_lowest_reward_later() -> None:
    run = finished("opob", 0, (0.4, 0.92, 0.5, 0.9))
    run["steps"]["shift_max"] = [1.0] * 10 + [0.5] * 40 + [0.0] * 30
    assert fate(run) == pytest.approx((0.5, 0.5))  # weights 40 to 59, after a start at 0.4 that does not count
