"""Which baseline survives stale data? A calculator toy under a fixed lag, trained with the project's own objective.

Each step trains on episodes that the weights of `lag` steps ago sampled, with AdamW, gradient clip 1, 8 tasks x 8
episodes.

    python -m benchmarks.stability --lags 8 32 --seeds 0 1 2 --out stability.json

A run has collapsed when the mean reward of its last 20 steps is below half of its best 20 steps. Every rule of
`RULES` is that of the named baseline in trainer/vcpo.py and trainer/family.py, or a variant that is tried here only.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from torch.func import functional_call, grad, vmap

from agentrl.algorithm import AlgorithmConfig
from benchmarks.calculator import Play, Policy, padded, rollout, task, warm_start
from trainer import vcpo
from trainer.family import Member, Objective

NUM_TASKS, GROUP_SIZE = 8, 8
WINDOW = 20

BaselineRule = Callable[[Tensor, Tensor, Tensor], Tensor | None]


def without_weights(log_weight_G: Tensor, norm_G: Tensor, reward_G: Tensor) -> Tensor | None:
    """b* from the norms alone, as if every weight were 1."""
    return vcpo.optimal_baseline(torch.zeros_like(log_weight_G), norm_G, reward_G)


RULES: dict[str, tuple[AlgorithmConfig, BaselineRule | None]] = {
    "opob": (AlgorithmConfig(baseline="opob", rho_base=1.0), None),
    "opob_safe": (AlgorithmConfig(baseline="opob_safe", rho_base=1.0), None),
    "opob_no_w2": (AlgorithmConfig(baseline="opob", rho_base=1.0), without_weights),
    "zero": (AlgorithmConfig(baseline="none", rho_base=1.0), None),
    "mean": (AlgorithmConfig(baseline="mean", rho_base=1.0), None),
    "tis": (AlgorithmConfig(preset="tis"), None),
    "uncorrected": (AlgorithmConfig(preset="tis", ratio="none", treatment="none"), None),
    "grpo": (AlgorithmConfig(preset="grpo"), None),
    "gspo": (AlgorithmConfig(preset="gspo", clip_low=0.05, clip_high=0.05), None),
    "m2po": (AlgorithmConfig(preset="m2po"), None),
    "bapo": (AlgorithmConfig(preset="bapo"), None),
}


@dataclass(kw_only=True)
class Step:
    """What one training step saw."""

    reward: float
    rho: float
    mean_weight: float
    grad_norm: float
    shift: float  # b* - mean R, mean over the groups with spread
    shift_max: float
    owned: float  # largest share of one trajectory in sum w^2 n^2 of a group, over the groups where that one succeeded
    pushed_down: float  # share of the groups' trajectories whose advantage is negative


@dataclass(kw_only=True)
class Run:
    """One training run."""

    rule: str
    lag: int
    seed: int
    lr: float
    steps: list[Step] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def final(self) -> float:
        """Mean reward of the last steps."""
        return _mean([step.reward for step in self.steps[-WINDOW:]])

    @property
    def has_collapsed(self) -> bool:
        """Defined at the top of this file."""
        rewards = [step.reward for step in self.steps]
        best = max(_mean(rewards[i : i + WINDOW]) for i in range(0, len(rewards) - WINDOW + 1))
        return self.final < best / 2


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


class Trainer:
    """Per-trajectory gradients by vmap, everything else by `trainer.family.Objective`."""

    def __init__(self, policy: Policy, rule: str, lr: float) -> None:
        self.policy = policy
        self.algorithm, self.own_rule = RULES[rule]
        self.objective = Objective(self.algorithm)
        self.optimizer = torch.optim.AdamW(policy.parameters(), lr=lr, weight_decay=0.0)
        self.lr = lr

    def step(self, plays: Sequence[Play]) -> Step:
        """One optimizer step on groups of GROUP_SIZE plays."""
        ids_BT, acted_BT, log_ratios = self.scored(plays)
        score_BP = self.scores(ids_BT, self.token_weights(plays, log_ratios, acted_BT))
        coefficient_B, notes = self.coefficients(plays, log_ratios, score_BP)
        total_P = (coefficient_B.float() @ score_BP) / len(plays)
        return self._update(total_P, plays, log_ratios, notes)

    def scored(self, plays: Sequence[Play]) -> tuple[Tensor, Tensor, list[Tensor]]:
        """(token ids [B, T], whether token t + 1 is an action [B, T - 1], each episode's log pi - log mu)."""
        ids_BT, acted_BT = padded([p.ids for p in plays]), padded([p.acted for p in plays])[:, 1:].bool()
        behavior_BT = _floats([p.logprobs for p in plays])[:, 1:]
        with torch.no_grad():
            log_ratio_BT = _logprobs(self.policy, ids_BT).double() - behavior_BT
        return ids_BT, acted_BT, [row[mask] for row, mask in zip(log_ratio_BT, acted_BT, strict=True)]

    def token_weights(self, plays: Sequence[Play], log_ratios: Sequence[Tensor], acted_BT: Tensor) -> Tensor:
        """What each action token's score is multiplied by, the advantage left out; norms want plain scores."""
        weight_BT = torch.zeros(acted_BT.shape)
        members = []
        for start in range(0, len(plays), GROUP_SIZE):
            group = plays[start : start + GROUP_SIZE]
            reward_G, num_actions_G = _rewards(group), torch.tensor([sum(p.acted) for p in group])
            advantage_G = self.objective.advantages(reward_G, num_actions_G)
            length_G = self.objective.lengths(num_actions_G)
            for i, play in enumerate(group):
                advantage = 0.0 if advantage_G is None else float(advantage_G[i])
                ratio_N = log_ratios[start + i]
                members.append(
                    Member(
                        log_ratio_N=ratio_N, advantage=advantage, reward=play.reward, group=start, logit_norm2_N=None
                    )
                )
                weight_BT[start + i] = acted_BT[start + i] / length_G[i]
        if self.objective.needs_norms:
            return weight_BT
        if self.objective.needs_batch:
            weights = self.objective.batch_weights(members)
        else:
            weights = [self.objective.weights(m.log_ratio_N, m.advantage) for m in members]
        for row, mask, member in zip(weight_BT, acted_BT, weights, strict=True):
            row[mask] *= member.weight_N.float()
        return weight_BT

    def scores(self, ids_BT: Tensor, weight_BT: Tensor) -> Tensor:
        """Gradient of each trajectory's weighted summed log-probability. [B, P]"""
        parameters = {name: p.detach() for name, p in self.policy.named_parameters()}

        def of_one(parameters: dict[str, Tensor], ids_T: Tensor, weight_T: Tensor) -> Tensor:
            logits_TV = functional_call(self.policy, parameters, (ids_T[None],))[0, :-1]
            return (logits_TV.log_softmax(-1).gather(1, ids_T[1:, None])[:, 0] * weight_T).sum()

        gradients = vmap(grad(of_one), in_dims=(None, 0, 0))(parameters, ids_BT, weight_BT)
        return torch.cat([gradients[name].flatten(1) for name, _ in self.policy.named_parameters()], dim=1)

    def coefficients(
        self, plays: Sequence[Play], log_ratios: Sequence[Tensor], score_BP: Tensor
    ) -> tuple[Tensor, dict[str, list[float]]]:
        """What each trajectory's row of scores is multiplied by, group by group."""
        coefficient_B = torch.zeros(len(plays), dtype=torch.float64)
        notes: dict[str, list[float]] = {"shift": [], "owned": [], "negative": []}
        for start in range(0, len(plays), GROUP_SIZE):
            group = plays[start : start + GROUP_SIZE]
            reward_G = _rewards(group)
            advantage_G = self.objective.advantages(reward_G, torch.tensor([sum(p.acted) for p in group]))
            if advantage_G is None:
                continue
            part = slice(start, start + GROUP_SIZE)
            if self.objective.needs_norms:
                weights = [self.objective.weights(log_ratios[start + i], 0.0) for i in range(len(group))]
                used_G = torch.tensor([w.log_used for w in weights], dtype=torch.float64)
                norm_G = score_BP[part].norm(dim=1).double()
                optimum = (self.own_rule or self.objective.baseline)(used_G, norm_G, reward_G)
                assert optimum is not None
                shift = float(optimum - reward_G.mean())
                share_G = torch.softmax(2 * (used_G + norm_G.log()), 0)
                owner = int(share_G.argmax())
                notes["shift"].append(shift)
                notes["owned"].append(float(share_G[owner]) * float(reward_G[owner] > 0))
                advantage_G = (advantage_G - shift) * used_G.exp()
            notes["negative"].append(float((advantage_G < 0).double().mean()))
            coefficient_B[part] = advantage_G
        return coefficient_B, notes

    def _update(
        self, total_P: Tensor, plays: Sequence[Play], log_ratios: Sequence[Tensor], notes: dict[str, list[float]]
    ) -> Step:
        log_weight_B = torch.stack([ratio_N.sum() for ratio_N in log_ratios])
        rho = float(vcpo.ess_ratio(log_weight_B))
        norm = float(total_P.norm())
        sizes = [p.numel() for p in self.policy.parameters()]
        for parameter, piece in zip(self.policy.parameters(), total_P.split(sizes), strict=True):  # type: ignore[no-untyped-call]
            parameter.grad = -piece.view_as(parameter) * min(1.0, 1.0 / (norm + 1e-6))
        rho_base = 1.0
        self.optimizer.param_groups[0]["lr"] = self.lr * vcpo.step_scale(rho, rho_base, self.algorithm.step_scale)
        self.optimizer.step()
        return Step(
            reward=_mean([play.reward for play in plays]),
            rho=rho,
            mean_weight=float(log_weight_B.clamp(max=50).exp().mean()),
            grad_norm=norm,
            shift=_mean(notes["shift"]),
            shift_max=max(notes["shift"], default=0.0),
            owned=max(notes["owned"], default=0.0),
            pushed_down=_mean(notes["negative"]),
        )


def _floats(rows: Sequence[Sequence[float]]) -> Tensor:
    longest = max(map(len, rows))
    return torch.tensor([[*row, *[0.0] * (longest - len(row))] for row in rows], dtype=torch.float64)


def _rewards(group: Sequence[Play]) -> Tensor:
    return torch.tensor([play.reward for play in group], dtype=torch.float64)


def _logprobs(policy: Policy, ids_BT: Tensor) -> Tensor:
    return policy(ids_BT)[:, :-1].log_softmax(-1).gather(2, ids_BT[:, 1:, None])[:, :, 0]


def train(rule: str, *, lag: int, seed: int, lr: float, num_steps: int) -> Run:
    """One run from one warm start."""
    started = time.perf_counter()
    policy = Policy()
    policy.load_state_dict(warm_start(seed))
    generator = torch.Generator().manual_seed(1000 + seed)
    trainer, behind = Trainer(policy, rule, lr), Policy()
    kept: deque[dict[str, Tensor]] = deque(maxlen=lag + 1)
    run = Run(rule=rule, lag=lag, seed=seed, lr=lr)
    for _ in range(num_steps):
        kept.append({name: value.clone() for name, value in policy.state_dict().items()})
        behind.load_state_dict(kept[0])
        tasks = [one for one in (task(generator) for _ in range(NUM_TASKS)) for _ in range(GROUP_SIZE)]
        run.steps.append(trainer.step(rollout(behind, tasks, generator)))
    run.seconds = time.perf_counter() - started
    return run


def main() -> None:
    """Run the sweep; one line a run, everything into `--out`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rules", nargs="+", default=list(RULES), choices=list(RULES))
    parser.add_argument("--lags", nargs="+", type=int, default=[8, 32])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--out", type=Path, default=Path("stability.jsonl"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for seed in arguments.seeds:
        for lag in arguments.lags:
            for rule in arguments.rules:
                run = train(rule, lag=lag, seed=seed, lr=arguments.lr, num_steps=arguments.steps)
                with arguments.out.open("a") as file:
                    file.write(json.dumps(asdict(run)) + "\n")
                verdict = "COLLAPSED" if run.has_collapsed else ""
                print(
                    f"{rule:12} lag {lag:2} seed {seed}: {run.final:.2f} in {run.seconds:.0f} s {verdict}", flush=True
                )


if __name__ == "__main__":
    main()
