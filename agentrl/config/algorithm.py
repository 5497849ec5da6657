"""The `algorithm` section: the policy gradient as settings over independent axes.

Says which combinations exist. Independent of how they are carried out (trainer/objective/policy_gradient.py).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from agentrl.config.presets import (
    OPTIMAL,
    PRESETS,
    WHOLE_BATCH,
    Baseline,
    LengthNorm,
    Preset,
    Ratio,
    StdNorm,
    StepScale,
    Treatment,
    refusal,
    unread,
    with_preset,
)
from agentrl.config.section import Choices, Section

OBJECTIVES = {
    "policy_gradient": "the settings of this section",
    "distillation": "every token's advantage is the teacher's log-probability minus the policy's (docs/teacher.md)",
    "imitation": "the likelihood of the episodes whose reward exceeds imitate_above",
}
"""The names in trainer/objective/registry.py, with one line on each."""
ObjectiveName = Annotated[
    str, Choices({**OBJECTIVES, "path/to/file.py:Class": "a class of your own; so is module:Class"})
]
BaselineWeights = Annotated[
    Literal["treated", "untreated", "product"],
    Choices(
        {
            "treated": "the weights of the gradient, such as min(w, c)",
            "untreated": "w as it is: the paper's formula",
            "product": "both, multiplied: what VCPO's released code computes",
        }
    ),
]
NormOf = Annotated[
    Literal["mean", "sum"],
    Choices(
        {
            "mean": "of its score as it is in the loss, divided by its length if the loss is",
            "sum": "of its summed score, whatever the loss divides by: VCPO's published scripts",
        }
    ),
]
BaselineNorms = Annotated[
    Literal["exact", "proxy"],
    Choices({"exact": "each trajectory's own gradient norm", "proxy": "a cheap stand-in, for large models"}),
]
Credit = Annotated[
    Literal["episode", "turn"],
    Choices(
        {
            "episode": "the reward of its episode, as in every preset",
            "turn": "the rewards of its turn and of those after it (docs/turn-credit.md)",
        }
    ),
]
KlKind = Annotated[
    Literal["k3", "k2", "reward"],
    Choices(
        {
            "k3": "GRPO's term of the loss, whose gradient is that of KL(reference, policy) on the policy's own data",
            "k2": "a term of the loss, whose gradient is that of KL(policy, reference) on the policy's own data",
            "reward": "kl_beta times the episode's log(policy / reference) is subtracted from its reward (TBA)",
        }
    ),
]
LINEAR = ("none", "mean", "leave_one_out", "length_weighted")
"""Baselines that are linear in the rewards."""


class SpuriousConfig(Section):
    """Tokens that are left out of the gradient: unlikely ones where the policy was sure, in rewarded episodes (STAPO).

    Example:
        >>> SpuriousConfig(probability=0.01, entropy_quantile=0.05).entropy is None
        True
    """

    probability: Annotated[float, Field(gt=0, lt=1)]
    """A token is spurious if its probability is below this,"""
    entropy: PositiveFloat | None = None
    """and the entropy of the distribution that it was sampled from below this, in nats;"""
    entropy_quantile: Annotated[float, Field(gt=0, lt=1)] | None = None
    """or, in its place, below this quantile of the entropies of the batch's tokens."""

    @model_validator(mode="after")
    def _has_one_bound(self) -> SpuriousConfig:
        if (self.entropy is None) == (self.entropy_quantile is None):
            raise ValueError("give either entropy, in nats, or entropy_quantile, a share of the batch's tokens")
        return self


class AlgorithmConfig(Section):
    """The policy gradient as settings over independent axes. docs/algorithms.md has the equations.

    `preset` fills in a published algorithm's settings (agentrl/config/presets.py); keys that are written out win.

    Example:
        >>> AlgorithmConfig(preset="grpo").treatment
        'clip'
        >>> AlgorithmConfig(preset="grpo", clip_high=0.3).clip_high
        0.3
    """

    preset: Preset = "vcpo_safe"
    """A published algorithm; the other keys override its settings."""
    objective: ObjectiveName = "policy_gradient"
    """What computes advantages and weights: docs/write-an-objective.md."""
    objective_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments of its constructor, if it is a class of your own."""
    ratio: Ratio = "sequence"
    """What the importance ratio pi/mu is taken of."""
    treatment: Treatment = "truncate"
    """What happens to large ratios w."""
    vtrace_rho: PositiveFloat = 1.0
    """ratio suffix: the bound of a token's own ratio, and of the last one's in the product of later ones."""
    vtrace_c: PositiveFloat = 1.0
    """ratio suffix: the bound of the other later ratios; at most vtrace_rho."""
    max_weight: PositiveFloat = 8.0
    """The c of truncate, min(w, c), and the upper end of mask."""
    min_weight: Annotated[float, Field(ge=0)] = 0.0
    """The lower end of mask."""
    clip_low: Annotated[float, Field(ge=0, le=1)] = 0.2
    """clip and clip_weight: ratios below 1 - clip_low are cut; 1 is no lower bound."""
    clip_high: Annotated[float, Field(ge=0)] = 0.2
    """clip and clip_weight: ratios above 1 + clip_high are cut."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """clip and adaptive_clip: where the advantage is negative, ratios above this are cut too (arXiv 1912.09729)."""
    second_moment_bound: PositiveFloat = 0.04
    """second_moment, second_moment_mask: bound of the mean (log ratio)^2 over tokens that PPO's clip can act on."""
    adaptive_low: tuple[PositiveFloat, PositiveFloat] = (0.6, 0.9)
    """adaptive_clip: range in which the lower bound of the ratio moves."""
    adaptive_high: tuple[PositiveFloat, PositiveFloat] = (1.2, 3.0)
    """adaptive_clip: range in which the upper bound of the ratio moves."""
    adaptive_step: tuple[PositiveFloat, PositiveFloat] = (0.05, 0.05)
    """adaptive_clip: distance by which the lower and the upper bound move at a time."""
    positive_share: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """adaptive_clip: share of the loss that tokens of positive advantage should have."""
    credit: Credit = "episode"
    """Which rewards a token is trained on."""
    baseline: Baseline = "opob_safe"
    """What is subtracted from each reward."""
    baseline_weights: BaselineWeights = "treated"
    """The opob baselines: which weights are in b*."""
    norm_of: NormOf = "mean"
    """The opob baselines: what of a trajectory the norm in b* is taken of."""
    baseline_norms: BaselineNorms = "exact"
    """The opob baselines: which gradient norms are in b*."""
    step_scale: StepScale = "ess_sqrt"
    """Factor on the learning rate, at most 1, from the batch's ESS ratio rho."""
    rho_base: PositiveFloat | Literal["auto"] = "auto"
    """ESS ratio at which the full learning rate is used. auto: that of data without lag, learned from tokens of the
    learner's own version; 1 until there are any."""
    normalize_by_length: LengthNorm = True
    """Divide each trajectory's summed log-probability gradient by its number of action tokens. group: by its group's
    tokens over the group's episodes, so that every token of a group counts alike (DAPO, CISPO)."""
    normalize_by_std: StdNorm = False
    """Divide a group's advantages by the standard deviation of its rewards (n - 1 in its denominator). population:
    by the one with n (VCPO's published scripts)."""
    spurious: SpuriousConfig | None = None
    """Leave unlikely tokens out where the policy was sure and the advantage is positive, and divide by the number of
    those that stay. null: none."""
    entropy_coef: Annotated[float, Field(ge=0)] = 0.0
    """Weight of an entropy term: the mean entropy of each episode's tokens (by normalize_by_length) is added to the
    objective."""
    keep_equal_rewards: bool = False
    """Keep groups of equal rewards in the batch. They have no gradient, and count in B and rho."""
    imitate_above: float = 0.0
    """imitation: episodes with a larger reward are imitated."""
    kl_beta: Annotated[float, Field(ge=0)] = 0.0
    """Strength of the penalty on leaving model.reference (docs/teacher.md). 0: none."""
    kl: KlKind = "k3"
    """Form of that penalty."""
    kl_beta_end: Annotated[float, Field(ge=0)] | None = None
    """Where kl_beta goes, in equal steps. null: it stays."""
    kl_beta_steps: PositiveInt = 500
    """Steps that it takes to kl_beta_end."""
    ess_floor: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Below this ESS ratio for `ess_floor_steps` steps in a row, admission allows one version of lag less, down to 0.
    It allows one more after ten times as many steps above."""
    ess_floor_steps: PositiveInt = 3
    """Steps in a row below `ess_floor` after which the lag shrinks."""
    refuse_below: Annotated[float, Field(gt=0, lt=1)] | None = None
    """A step whose ESS ratio is below this is refused: the weights stay as they are."""
    variance_every: Annotated[int, Field(ge=0)] = 0
    """Steps between measurements of the gradient's variance under each baseline, from halves of the batch. Each costs
    the passes of up to nine steps. 0: never."""

    @model_validator(mode="before")
    @classmethod
    def _fill_from_preset(cls, given: Any) -> Any:
        return with_preset(given) if isinstance(given, dict) else given

    @model_validator(mode="after")
    def _makes_sense(self) -> AlgorithmConfig:
        if ":" not in self.objective and self.objective not in OBJECTIVES:
            known = ", ".join(OBJECTIVES)
            raise ValueError(f"objective={self.objective} is not known: {known}; your own: path/to/file.py:Class")
        if self.objective_kwargs and self.objective in OBJECTIVES:
            raise ValueError(f"objective={self.objective} takes no arguments of its own; leave objective_kwargs out")
        if reason := refusal(ratio=self.ratio, treatment=self.treatment, baseline=self.baseline):
            raise ValueError(reason)
        if reason := unread(self.treatment, self._changed()):
            raise ValueError(reason)
        if reason := self._unread_terms():
            raise ValueError(reason)
        if self.baseline_norms == "proxy" and self.baseline not in OPTIMAL:
            raise ValueError(f"baseline={self.baseline} uses no norms; leave baseline_norms out")
        if "baseline_weights" in self._changed() and self.baseline not in OPTIMAL:
            raise ValueError(f"baseline={self.baseline} uses no weights; leave baseline_weights out")
        if "norm_of" in self._changed() and self.baseline not in OPTIMAL:
            raise ValueError(f"baseline={self.baseline} uses no norms; leave norm_of out")
        if self.keep_equal_rewards and not self.needs_spread:
            raise ValueError(f"baseline={self.baseline} drops no group; leave keep_equal_rewards out")
        if self.treatment == "mask" and self.min_weight >= self.max_weight:
            raise ValueError(f"min_weight={self.min_weight:g} must be below max_weight={self.max_weight:g}")
        for name in ("adaptive_low", "adaptive_high"):
            low, high = getattr(self, name)
            if low > high:
                raise ValueError(f"{name} must rise, got [{low:g}, {high:g}]")
        if reason := self._objective_refusal() or self._penalty_refusal() or self._credit_refusal():
            raise ValueError(reason)
        if self.refuse_below is not None and self.ess_floor is not None and self.refuse_below >= self.ess_floor:
            raise ValueError("refuse_below must be below ess_floor: a step is refused only where shrinking is too slow")
        return self

    def _unread_terms(self) -> str | None:
        """Why V-trace's bounds or the spurious tokens make no sense with the other settings, and the fix; else None."""
        for name in ("vtrace_rho", "vtrace_c"):
            if self.ratio != "suffix" and name in self._changed():
                return f"{name} does nothing under ratio={self.ratio}; leave it out, or set ratio: suffix"
        if self.vtrace_c > self.vtrace_rho:
            return f"vtrace_c={self.vtrace_c:g} must be at most vtrace_rho={self.vtrace_rho:g}"
        if self.spurious is not None and self.baseline in OPTIMAL | {"otb"}:
            return (
                f"spurious depends on the sign of the advantage, which baseline={self.baseline} derives from the "
                "weights; leave it out, or set baseline: mean"
            )
        return None

    def _changed(self) -> set[str]:
        """Names of the settings that differ from what the preset alone gives."""
        alone = {name: field.default for name, field in type(self).model_fields.items()} | dict(PRESETS[self.preset])
        return {name for name, value in self if value != alone[name]}

    def _objective_refusal(self) -> str | None:
        """Why a setting makes no sense under `objective`, and how to fix it; None where all do."""
        changed = self._changed()
        if self.objective != "imitation" and "imitate_above" in changed:
            return "imitate_above does nothing but under objective=imitation; leave it out, or set preset: imitate"
        if self.objective not in ("distillation", "imitation"):
            return None
        if given := sorted(changed & {"baseline", "normalize_by_std", "kl_beta", "kl_beta_end", "variance_every"}):
            name = given[0]
            return f"{name}={getattr(self, name)} does nothing under objective={self.objective}; leave it out"
        if self.objective == "distillation" and self.spurious is not None:
            return "spurious tokens have a positive advantage, and objective=distillation has none; leave spurious out"
        if self.treatment in {"clip", *WHOLE_BATCH}:
            return (
                f"treatment={self.treatment} depends on the sign of the advantage, which objective={self.objective} "
                "does not have; set treatment: truncate, mask or clip_weight"
            )
        return None

    def _penalty_refusal(self) -> str | None:
        """Why the settings of the penalty make no sense, and how to fix it; None where they do."""
        if not self.has_penalty:
            given = sorted(self._changed() & {"kl", "kl_beta_end", "kl_beta_steps"})
            return f"{given[0]} does nothing under kl_beta=0; leave it out, or set kl_beta" if given else None
        if self.kl_beta_end is None and "kl_beta_steps" in self._changed():
            return "kl_beta_steps does nothing without kl_beta_end; leave it out, or set kl_beta_end"
        if self.kl == "reward" and (self.baseline not in LINEAR or self.normalize_by_std):
            return (
                f"kl=reward changes a group's rewards once it is scored, which baseline={self.baseline} or "
                f"normalize_by_std={str(self.normalize_by_std).lower()} cannot follow; set kl: k2, or baseline: mean "
                "and normalize_by_std: false"
            )
        if self.variance_every:
            return "variance_every compares baselines of rewards alone; leave it out under kl_beta"
        return None

    def _credit_refusal(self) -> str | None:
        """Why a setting makes no sense under `credit: turn`, and how to fix it; None where all do."""
        if self.credit == "episode":
            return None
        if self.objective != "policy_gradient":
            return f"credit=turn does nothing under objective={self.objective}; leave it out"
        for name, *known in (
            ("baseline", "none", "leave_one_out"),
            ("ratio", "none", "sequence"),
            ("treatment", "none", "truncate"),
            ("normalize_by_std", False),
            ("spurious", None),
            ("variance_every", 0),
        ):
            if (given := getattr(self, name)) not in known:
                fix = " or ".join("null" if one is None else str(one).lower() for one in known)
                return (
                    f"{name}={given} is made for one advantage an episode, and credit=turn has one for each turn; set "
                    f"{name}: {fix}. preset: rloo with ratio: sequence and treatment: truncate is a beginning"
                )
        if self.has_penalty and self.kl == "reward":
            return "kl=reward changes the reward of a whole episode, and credit=turn divides it; set kl: k2 or k3"
        return None

    @property
    def needs_reference(self) -> bool | None:
        """Whether the objective needs `model.reference`; None for a class of the user's, which says so itself."""
        if self.objective not in OBJECTIVES:
            return None
        return self.has_penalty or self.objective == "distillation"

    @property
    def has_penalty(self) -> bool:
        """Whether there is a penalty on leaving `model.reference`."""
        return self.kl_beta > 0 or bool(self.kl_beta_end)

    @property
    def compares_members(self) -> bool:
        """Whether an episode's advantage depends on the other episodes of its group."""
        return self.baseline != "none" or bool(self.normalize_by_std)

    @property
    def has_terms(self) -> bool:
        """Whether the objective has terms beside advantages times weights."""
        return self.entropy_coef > 0 or self.has_penalty

    @property
    def looks_at_batch(self) -> bool:
        """Whether objective=policy_gradient weighs an episode by all of its batch, which must be whole before.

        >>> AlgorithmConfig(preset="m2po").looks_at_batch, AlgorithmConfig(preset="grpo").looks_at_batch
        (True, False)
        """
        spurious = self.spurious
        by_others = spurious is not None and (spurious.entropy is None or self.normalize_by_length == "group")
        penalizes_rewards = self.has_penalty and self.kl == "reward"
        return by_others or penalizes_rewards or self.baseline == "otb" or self.treatment in WHOLE_BATCH

    @property
    def needs_spread(self) -> bool:
        """Whether a group of equal rewards has no gradient. With credit by turn, its turns may differ."""
        return self.compares_members and not self.has_penalty and self.credit == "episode"

    @property
    def drops_equal_rewards(self) -> bool:
        """Whether a group of equal rewards is dropped before it is in a batch."""
        return self.needs_spread and not self.keep_equal_rewards
