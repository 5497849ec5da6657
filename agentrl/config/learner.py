"""The `learner` section: DeepSpeed. Independent of any other section."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from agentrl.config.section import Choices, Section

Schedule = Annotated[
    Literal["constant", "linear", "cosine"],
    Choices(
        {
            "constant": "the full rate after the warm-up",
            "linear": "falls in equal steps to 0 at train.steps",
            "cosine": "falls along half a cosine to 0 at train.steps",
        }
    ),
]

GradientMethod = Annotated[
    Literal["auto", "plain", "one_pass", "one_pass_sharded", "two_pass"],
    Choices(
        {
            "auto": "plain without norms; two_pass where it alone can, or norms are by proxy; else the first "
            "of one_pass, one_pass_sharded (several ranks) and two_pass that fits into the GPU",
            "plain": "DeepSpeed's own backward, without sums: for algorithms without score norms, and any architecture",
            "one_pass": "one backward, into float32 sums on every rank: with exact norms two, 8 bytes a parameter",
            "one_pass_sharded": "the same, each sum divided among the ranks: 8 bytes a parameter over the ranks",
            "two_pass": "a backward for the norms, which keeps nothing, then one for the gradient",
        }
    ),
]


class LearnerConfig(Section):
    """DeepSpeed: optimizer, memory, ranks, checkpoints.

    Example:
        >>> LearnerConfig(lr=1e-4, zero_stage=2).checkpoint_every
        20
    """

    lr: PositiveFloat = 1e-6
    """Learning rate of AdamW: the highest one of the schedule. algorithm.step_scale multiplies it further."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """First steps, in which the learning rate rises in equal steps: step n of these has n / warmup_steps of it."""
    schedule: Schedule = "constant"
    """The learning rate after the warm-up. It depends on the step's number, so a resumed run continues it."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Decoupled weight decay of AdamW."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay of AdamW's first and second moment."""
    grad_clip: PositiveFloat = 1.0
    """Largest norm of the gradient; a longer one is scaled down to it."""
    gradient: GradientMethod = "auto"
    """How a step's gradient is made. All ways give the same gradient; they differ in memory and time."""
    zero_stage: Literal[0, 1, 2, 3] = 1
    """What DeepSpeed splits over the ranks. 0: nothing; 1: optimizer states; 2: gradients too; 3: parameters too."""
    offload_optimizer: bool = False
    """Keep the optimizer's states (and its float32 weights, where the model's have another type) in host memory, and
    step there. Stages 1 to 3."""
    gradient_checkpointing: bool = False
    """Compute activations again in the backward pass instead of keeping them: less memory, a third more time."""
    offload_activations: bool = False
    """Keep what gradient_checkpointing keeps, the layers' inputs, in host memory."""
    mlp_tiles: PositiveInt = 1
    """Parts in which each MLP goes through a pack, one after the other and computed again in the backward: their wide
    hidden layer takes the memory of one part. Passes that measure exact norms compute whole MLPs."""
    stream_groups: bool = False
    """At rollout.max_lag 0: compute the gradient of each group as soon as it has finished, while the others of its
    batch are still played. The step, and the new weights, are the same as without it, up to rounding."""
    pack_tokens: PositiveInt = 8192
    """Tokens of one micro-batch, into which trajectories are packed. A longer trajectory has one to itself."""
    num_ranks: PositiveInt = 1
    """Processes that share each step: one for each GPU."""
    sequence_parallel: PositiveInt = 1
    """Ranks that divide the tokens of each pack among them (DeepSpeed-Ulysses), so that trajectories fit which are too
    long for one GPU. It divides num_ranks and the model's attention heads. 1: every rank has whole trajectories."""
    hostfile: str | None = None
    """File of lines `name slots=8`: the machines on which DeepSpeed's launcher starts the ranks, this one first, with
    num_ranks slots in all. null: all on this machine. See docs/cluster.md."""
    num_threads: PositiveInt | None = None
    """CPU threads of one rank. null: 1; with offload_optimizer, which steps on the CPU, the rank's share of the
    machine's cores."""
    max_restarts: Annotated[int, Field(ge=0)] = 3
    """How often a learner that died is restarted from its newest checkpoint. Each hour without a failure adds one
    restart, up to this number. No finished episode is lost."""
    start_timeout_s: PositiveFloat = 180.0
    """Deadline for the learner to load the model."""
    step_timeout_s: PositiveFloat = 600.0
    """Deadline of one step."""
    save_every: Annotated[int, Field(ge=0)] = 50
    """Steps between exports of the weights in Hugging Face layout. The last step is always exported; 0: only that."""
    checkpoint_every: Annotated[int, Field(ge=0)] = 20
    """Steps between checkpoints of the learner's whole state, optimizer included, for resuming. Steps after the newest
    checkpoint are repeated from the journal, with the same episodes. 0: no checkpoints, all steps are repeated."""
    keep_checkpoints: PositiveInt = 2
    """Checkpoints that are kept. The oldest is deleted when a new one is complete."""

    @model_validator(mode="after")
    def _can_offload(self) -> LearnerConfig:
        if self.offload_optimizer and self.zero_stage == 0:
            raise ValueError(
                "offload_optimizer needs zero_stage 1, 2 or 3: in stage 0 the optimizer stays where the model is"
            )
        return self

    @model_validator(mode="after")
    def _can_offload_activations(self) -> LearnerConfig:
        if self.offload_activations and not self.gradient_checkpointing:
            raise ValueError(
                "offload_activations keeps the inputs of checkpointed layers: set gradient_checkpointing=true"
            )
        return self

    @model_validator(mode="after")
    def _can_divide_packs(self) -> LearnerConfig:
        if self.num_ranks % self.sequence_parallel:
            raise ValueError(
                f"sequence_parallel={self.sequence_parallel} must divide num_ranks={self.num_ranks}: every pack is "
                "divided among so many ranks, and the batch among the groups of them"
            )
        return self


STREAMS_NO_WHOLE_BATCH = (
    "learner.stream_groups computes the gradient of a group before its batch is whole, and this objective weighs each "
    "episode by the whole batch (algorithm.treatment, baseline, spurious or kl=reward, or needs_batch of your class): "
    "set learner.stream_groups=false, or another algorithm.preset"
)


def method_refusal(
    method: GradientMethod, *, has_norms: bool, is_exact: bool, needs_norms_first: bool, is_divided: bool = False
) -> str | None:
    """Why `learner.gradient` cannot make the gradient of an objective, and how to fix it; None where it can.

    `has_norms`: the objective needs score norms; `is_exact`: not by proxy; `needs_norms_first`:
    before its gradient is made, since each episode has its own baseline or there are further terms; `is_divided`:
    each trajectory is, by sequence_parallel.

    >>> method_refusal("one_pass", has_norms=True, is_exact=True, needs_norms_first=False)
    """
    if method == "plain" and has_norms:
        return (
            "learner.gradient=plain measures no score norms, and this objective needs them (algorithm.baseline, or "
            "needs_norms of your class): set "
            "learner.gradient: auto"
        )
    if method == "one_pass_sharded" and not (has_norms and is_exact):
        return (
            "learner.gradient=one_pass_sharded divides the two sums of exact norms, and this objective measures none "
            "(algorithm.baseline, algorithm.baseline_norms): set learner.gradient: auto"
        )
    if method in ("one_pass", "one_pass_sharded") and has_norms and needs_norms_first:
        return (
            f"learner.gradient={method} moves one baseline for a whole group once its gradient is made, and this "
            "objective has one for each episode (algorithm.baseline), or terms beside the advantages "
            "(algorithm.entropy_coef, kl_beta): set learner.gradient: two_pass, or auto"
        )
    if method in ("one_pass", "one_pass_sharded") and has_norms and is_exact and is_divided:
        return (
            f"learner.gradient={method} measures the exact norm of a trajectory that one rank has, and "
            "learner.sequence_parallel divides each: set learner.gradient: two_pass, or auto"
        )
    if method == "two_pass" and not has_norms:
        return (
            "learner.gradient=two_pass measures score norms in a first pass, and this objective needs none "
            "(algorithm.baseline): set learner.gradient: auto"
        )
    return None
