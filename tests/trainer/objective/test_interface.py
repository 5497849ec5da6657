"""An objective of one's own: found by its name, its gradient that of its written loss, its mistakes named."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from agentrl.config.algorithm import OBJECTIVES, AlgorithmConfig
from agentrl.errors import ConfigError
from agentrl.testing import episode_of, with_members
from agentrl.types import TrajectoryGroup
from tests.agentrl.training.troubles import Trouble
from tests.trainer.trainer_builders import batch, config, mixed_groups
from trainer.gradient.step_gradient import Estimator
from trainer.learner import Learner
from trainer.objective import Group, Member, MemberWeights, Objective, PolicyGradient, by_group, registry
from trainer.objective.registry import make_objective

FAILS = Trouble("algorithm.objective: ... fails on two episodes of 3 and 2 action tokens: ...")
WRONG = Trouble("algorithm.objective: ... returned ...; it must return ...")
NEEDS_ONE = Trouble("algorithm.objective: ... has ..., which exact score norms in one pass do not take: ...")

HEAD = "import torch\nfrom trainer.objective import MemberWeights, Objective, PolicyGradient, Terms\n"
IMITATION = """
class Rule(Objective):
    def __init__(self, algorithm, bonus=0.0):
        super().__init__(algorithm)
        self.bonus = bonus

    def advantages(self, group):
        return (group.reward_E > 0).double() + self.bonus

    def weights(self, member):
        return MemberWeights.of(member, torch.ones_like(member.log_ratio_N))
"""


def named(tmp_path: Path, source: str, **settings: Any) -> AlgorithmConfig:
    path = tmp_path / "rules.py"
    path.write_text(HEAD + source)
    return AlgorithmConfig(objective=f"{path}:Rule", **settings)


def estimated(model: Any, groups: list[TrajectoryGroup], algorithm: AlgorithmConfig, num_episodes: int = 12) -> Tensor:
    estimator = Estimator(model, algorithm, pack_tokens=40)
    stats = estimator.estimate(groups, policy_version=0, num_episodes=num_episodes)
    assert not [name for group in stats for member in group.trajectories for name in member.non_finite()]
    return torch.cat([total.flatten() for total in estimator.sums.total]).double()


Term = Callable[[Any, Tensor, Tensor], Tensor]  # (trajectory, log pi [N], entropy [N]) -> its part of the loss


def autograd_of(model: Any, groups: list[TrajectoryGroup], term: Term) -> Tensor:
    """grad of 1/B sum_i term_i in float64, from the whole model's own logits."""
    model = copy.deepcopy(model).double()
    terms = []
    members = [member for group in groups for member in group.trajectories]
    for member in members:
        ids = torch.tensor(member.token_ids())
        acted = torch.tensor(member.action_mask(), dtype=torch.bool)[1:]
        log_p = model(input_ids=ids[None], use_cache=False).logits[0, :-1].log_softmax(-1)[acted]
        logprob_N = log_p.gather(1, ids[1:][acted][:, None])[:, 0]
        terms.append(term(member, logprob_N, -(log_p.exp() * log_p).sum(-1)))
    gradients = torch.autograd.grad(torch.stack(terms).sum() / len(members), list(model.parameters()))
    return torch.cat([gradient.flatten() for gradient in gradients])


def relative_error(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).norm() / theirs.norm())


def test_the_config_names_the_objectives_of_the_registry() -> None:
    assert list(OBJECTIVES) == list(registry.OBJECTIVES)


def test_a_class_of_ones_own_has_the_gradient_of_its_written_loss(tmp_path: Path, tiny_model: Any) -> None:
    """J = 1/B sum_i (1[R > 0] + 0.25) mean_t log pi_t, groups of equal rewards included."""
    groups = mixed_groups(tiny_model, off_policy=0.4)
    algorithm = named(tmp_path, IMITATION, objective_kwargs={"bonus": 0.25})
    theirs = autograd_of(tiny_model, groups, lambda one, logprob_N, _: ((one.reward > 0) + 0.25) * logprob_N.mean())
    assert relative_error(estimated(tiny_model, groups, algorithm), theirs) < 1e-5


def test_further_terms_have_the_gradient_of_their_written_loss(tmp_path: Path, tiny_model: Any) -> None:
    """J = 1/B sum_i mean_t (R r_t / sg + 0.3 H_t - 0.1 (log pi_t)^2 / 2): an entropy and a quadratic term, by hand."""
    source = """
class Rule(PolicyGradient):
    def terms(self, member):
        return Terms(logprob_seed_N=-0.1 * member.logprob_N, entropy_seed_N=torch.full_like(member.logprob_N, 0.3))
"""
    groups = mixed_groups(tiny_model, off_policy=0.4)

    def loss(one: Any, logprob_N: Tensor, entropy_N: Tensor) -> Tensor:
        return (one.reward * logprob_N + 0.3 * entropy_N - 0.05 * logprob_N.square()).mean()

    ours = estimated(tiny_model, groups, named(tmp_path, source, preset="reinforce", normalize_by_length=True))
    assert relative_error(ours, autograd_of(tiny_model, groups, loss)) < 1e-5


def test_terms_beside_a_baseline_of_norms_are_added_to_its_gradient(tiny_model: Any) -> None:
    """J = VCPO's + 0.3/B sum_i mean_t H_t"""
    groups = mixed_groups(tiny_model, off_policy=0.4)[:2]
    ours, without = (
        estimated(tiny_model, groups, AlgorithmConfig(preset="vcpo", entropy_coef=c), num_episodes=8)
        for c in (0.3, 0.0)
    )
    theirs = without + autograd_of(tiny_model, groups, lambda one, _, entropy_N: 0.3 * entropy_N.mean())
    assert relative_error(ours, theirs) < 1e-5


def test_the_learner_steps_along_the_gradient_of_a_class_of_ones_own(
    tmp_path: Path, tiny_model_dir: Path, tiny_model: Any
) -> None:
    """By DeepSpeed's own backward: J = 1/B sum_i (1[R > 0] mean_t log pi_t + 0.3 mean_t H_t)."""
    source = IMITATION + "\n    def terms(self, member):\n        "
    source += "return Terms(entropy_seed_N=torch.full_like(member.logprob_N, 0.3))\n"
    algorithm = named(tmp_path, source).model_dump(mode="json", exclude_unset=True)
    learner = Learner(config(tiny_model_dir, algorithm={**algorithm, "rho_base": 1.0}))
    groups = mixed_groups(tiny_model)

    def loss(one: Any, logprob_N: Tensor, entropy_N: Tensor) -> Tensor:
        return ((one.reward > 0) * logprob_N + 0.3 * entropy_N).mean()

    output = learner.step(batch(groups))
    assert output.metrics["learner/grad_norm"] == pytest.approx(
        float(autograd_of(tiny_model, groups, loss).norm()), rel=1e-5
    )


def test_advantages_may_differ_among_the_tokens_of_an_episode(tmp_path: Path, tiny_model: Any) -> None:
    """A_t = t + 1, counted over the segments of an episode, against the same written out."""
    source = IMITATION.replace(
        "return (group.reward_E > 0).double() + self.bonus",
        "return [torch.arange(1, n + 1) for n in group.num_actions_E.tolist()]",
    )
    group = mixed_groups(tiny_model)[2]
    first, second, *others = group.trajectories
    cut = with_members(group, [episode_of(first, second), *others])
    start = {second.id: first.num_action_tokens}

    def loss(one: Any, logprob_N: Tensor, _: Tensor) -> Tensor:
        at = start.get(one.id, 0)
        return (torch.arange(at + 1, at + 1 + len(logprob_N)) * logprob_N).sum() * len(group.trajectories) / 3

    ours = estimated(tiny_model, [cut], named(tmp_path, source, normalize_by_length=False), num_episodes=3)
    theirs = autograd_of(tiny_model, [group], loss)
    assert relative_error(ours, theirs) < 1e-5


def test_ppos_clip_looks_at_each_tokens_own_advantage() -> None:
    objective = make_objective(AlgorithmConfig(preset="grpo"))
    log_ratio_N = torch.tensor([2.0, 2.0, 0.5, 0.5], dtype=torch.float64).log()
    advantage_N = torch.tensor([1.0, -1.0, 1.0, -1.0], dtype=torch.float64)
    member = Member(log_ratio_N=log_ratio_N, advantage=0.0, reward=0.0, group=0, advantage_N=advantage_N)
    torch.testing.assert_close(
        objective.weights(member).weight_N, torch.tensor([0.0, 2.0, 0.5, 0.0], dtype=torch.float64)
    )


@pytest.mark.parametrize(
    ("source", "trouble"),
    [
        ("", "'Rule' does not exist"),
        ("class Rule: ...", "is not an Objective: derive it, `class Rule(Objective):`"),
        ("class Rule(Objective): ...", "does not define advantages, weights"),
        (IMITATION.replace("bonus=0.0", "bonus"), "cannot make Rule: "),
        (IMITATION.replace("group.reward_E", "group.rewards"), FAILS),
        (IMITATION.replace("(group.reward_E > 0).double()", "torch.ones(5)"), WRONG),
        (IMITATION.replace("return (group.reward_E > 0).double()", "return [torch.ones(4)] * 2 #"), WRONG),
        (IMITATION.replace("torch.ones_like(member.log_ratio_N)", "torch.ones(1)"), WRONG),
        (IMITATION.replace("MemberWeights.of(member, ", "(").replace("))\n", "))"), WRONG),
        (IMITATION.replace("ones_like(member.log_ratio_N)", "log(-torch.ones_like(member.log_ratio_N))"), WRONG),
        (IMITATION + "    needs_batch = True\n\n    def batch_weights(self, members):\n        return []\n", WRONG),
        (IMITATION + "\n    def terms(self, member):\n        return Terms(entropy_seed_N=torch.ones(1))\n", WRONG),
    ],
)
def test_a_mistake_in_a_class_is_named_before_the_first_step(
    tmp_path: Path, source: str, trouble: str | Trouble
) -> None:
    algorithm = named(tmp_path, source)
    with pytest.raises(ConfigError) as found:
        make_objective(algorithm)
    assert trouble in str(found.value) if isinstance(trouble, str) else trouble.is_in(found.value)


def test_an_unknown_name_and_arguments_that_nothing_takes_are_refused_by_the_config() -> None:
    with pytest.raises(
        ValueError,
        match=r"objective=ppo is not known: policy_gradient, .*; your own: path/to/file\.py",
    ):
        AlgorithmConfig(objective="ppo")
    with pytest.raises(ValueError, match="takes no arguments of its own"):
        AlgorithmConfig(objective_kwargs={"bonus": 1.0})


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (IMITATION.replace("+ self.bonus", "/ (group.step - 1)"), "advantage of algorithm.objective"),
        (
            IMITATION + "\n    def terms(self, member):\n        "
            "return Terms(logprob_seed_N=member.logprob_N / (member.step - 1))\n",
            "terms of algorithm.objective",
        ),
    ],
)
def test_what_is_not_finite_in_a_later_step_is_named_and_not_in_the_gradient(
    tmp_path: Path, tiny_model: Any, source: str, expected: str
) -> None:
    estimator = Estimator(tiny_model, named(tmp_path, source))
    stats = estimator.estimate(mixed_groups(tiny_model, version=1)[:1], policy_version=1, num_episodes=4)
    assert expected in {name for member in stats[0].trajectories for name in member.non_finite()}
    assert all(bool(total.isfinite().all()) for total in estimator.sums.total)


@pytest.mark.parametrize(
    "part",
    [
        "def terms(self, member):\n        return Terms(entropy_seed_N=0 * member.logprob_N)\n",
        "def weights(self, member):\n        return MemberWeights.of(member, torch.arange(len(member.log_ratio_N)))\n",
    ],
)
def test_exact_norms_in_one_pass_refuse_what_differs_among_the_tokens(
    tmp_path: Path, tiny_model: Any, part: str
) -> None:
    source = f"class Rule(PolicyGradient):\n    {part}"
    groups = mixed_groups(tiny_model)
    with pytest.raises(ConfigError) as found:
        estimated(tiny_model, groups, named(tmp_path, source))
    assert NEEDS_ONE.is_in(found.value)
    estimated(tiny_model, groups, named(tmp_path, source.replace("\n", "\n    has_terms = True\n", 1)))
    assert estimated(tiny_model, groups, named(tmp_path, source, baseline_norms="proxy")).norm() > 0


class Spread(Objective):
    """Looks at whole groups in batch_weights."""

    needs_batch = True

    def advantages(self, group: Group) -> Tensor:
        return group.reward_E

    def weights(self, member: Member) -> MemberWeights:
        raise AssertionError("not called where needs_batch")

    def batch_weights(self, members: Any) -> list[MemberWeights]:
        sums = torch.tensor([float(member.log_ratio_N.sum()) for member in members], dtype=torch.float64)
        for index_G in by_group(members):
            sums[index_G] = sums[index_G] - sums[index_G].mean()
        return [
            MemberWeights.of(
                member,
                torch.ones_like(member.log_ratio_N),
                logprob_seed_N=torch.full_like(member.log_ratio_N, float(value)),
            )
            for member, value in zip(members, sums, strict=True)
        ]


def test_a_term_may_depend_on_the_whole_group(tiny_model: Any) -> None:
    """J = 1/B sum_i sum_t (R_i + d_i - mean d) log pi_t with d_i the sum of the log-ratios."""
    groups = mixed_groups(tiny_model, off_policy=0.4)
    algorithm = AlgorithmConfig(objective=f"{__name__}:Spread", normalize_by_length=False)
    distance: dict[str, float] = {}
    autograd_of(tiny_model, groups, lambda one, logprob_N, _: _keep(distance, one, logprob_N))
    mean = {
        member.id: sum(distance[other.id] for other in group.trajectories) / len(group.trajectories)
        for group in groups
        for member in group.trajectories
    }
    theirs = autograd_of(
        tiny_model, groups, lambda one, logprob_N, _: (one.reward + distance[one.id] - mean[one.id]) * logprob_N.sum()
    )
    assert relative_error(estimated(tiny_model, groups, algorithm), theirs) < 1e-5


def _keep(distance: dict[str, float], one: Any, logprob_N: Tensor) -> Tensor:
    acted = [value for value, mask in zip(one.behavior_logprobs(), one.action_mask(), strict=True) if mask]
    distance[one.id] = float(logprob_N.detach().sum()) - math.fsum(acted)
    return logprob_N.sum()


def test_a_preset_is_an_instance_of_the_interface() -> None:
    assert isinstance(make_objective(AlgorithmConfig(preset="dapo")), PolicyGradient)
