"""The toy's own arithmetic: episodes, collapses, and the gradient it hands to the optimizer."""

from __future__ import annotations

import pytest
import torch

from benchmarks.calculator import INDEX, Play, Policy, rollout, task
from benchmarks.stability import GROUP_SIZE, RULES, Run, Step, Trainer


def played(text: str) -> Play:
    play = Play(target=75, ids=[], acted=[], logprobs=[])
    play.observe("?17+58>")
    for character in text:
        play.act(INDEX[character], -0.5)
    return play


@pytest.mark.parametrize(("text", "reward"), [("C17+58;A75$", 1.0), ("A75$", 1.0), ("C17+58;A74$", 0.0), ("$", 0.0)])
def test_only_the_right_answer_is_rewarded(text: str, reward: float) -> None:
    play = played(text)
    assert play.is_over and play.reward == reward
    assert sum(play.acted) == len(text) == sum(logprob != 0 for logprob in play.logprobs)


def test_the_calculators_reply_is_no_action() -> None:
    play = played("C17+58;")
    assert not play.is_over
    assert play.ids[-4:] == [INDEX[character] for character in "R75;"]
    assert play.acted[-4:] == [False] * 4


def test_a_run_has_collapsed_when_it_ends_below_half_of_its_best() -> None:
    def run(*rewards: float) -> Run:
        values = dict.fromkeys(("rho", "mean_weight", "grad_norm", "shift", "shift_max", "owned", "pushed_down"), 0.0)
        steps = [Step(reward=reward, **values) for reward in rewards for _ in range(20)]
        return Run(rule="tis", lag=8, seed=0, lr=1e-3, steps=steps)

    assert run(0.4, 0.9, 0.4).has_collapsed
    assert not run(0.4, 0.9, 0.5).has_collapsed


@pytest.mark.parametrize("rule", ["tis", "grpo", "opob", "m2po"])
def test_the_gradient_is_that_of_the_weighted_log_probabilities(rule: str) -> None:
    """Rows of per-episode scores by vmap against one autograd pass over the same coefficients."""
    torch.manual_seed(0)
    policy, generator = Policy(), torch.Generator().manual_seed(0)
    plays = rollout(policy, [one for one in (task(generator), task(generator)) for _ in range(GROUP_SIZE)], generator)
    for i, play in enumerate(plays):
        play.reward = float(i % 3 == 0)
        play.logprobs = [logprob and logprob - 0.1 for logprob in play.logprobs]
    trainer = Trainer(policy, rule, lr=1e-3)
    ids, acted, log_ratios = trainer.scored(plays)
    weight_BT = trainer.token_weights(plays, log_ratios, acted)
    score_BP = trainer.scores(ids, weight_BT)
    coefficient_B, _ = trainer.coefficients(plays, log_ratios, score_BP)
    logprob_BT = policy(ids)[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None])[:, :, 0]
    loss = ((logprob_BT * weight_BT).sum(1) * coefficient_B.float()).sum()
    theirs = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(policy.parameters()))])
    torch.testing.assert_close(coefficient_B.float() @ score_BP, theirs, rtol=1e-4, atol=1e-6)
    assert RULES[rule][0] is trainer.algorithm
