"""Supervised warm start: a small model learns to imitate an environment's scripted demonstrator.

It uses demonstrations with their real tool outputs, Muon and AdamW. Independent of particular environments and of
rewards: the demonstrator's mistakes are imitated too, and reinforcement learning has to remove them.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import groupby, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from agentrl.config import Config, WarmstartConfig
from agentrl.env import Env, Episode, checked_script, load_env_class, opened, play_script, rows_of
from agentrl.errors import ConfigError, SandboxError, raise_first
from agentrl.tokens.tokenizer import TurnTokenizer
from agentrl.types import Message, Task
from trainer.warmstart.tiny_model import MIN_VOCAB_SIZE, make_model, make_tokenizer, save

if TYPE_CHECKING:
    from sandbox.client import SandboxClient

log = logging.getLogger(__name__)

TASK_SEED_OFFSET = 1_000_003  # so that reinforcement learning does not begin with the tasks of the warm start
TOKENIZER_SAMPLE = 600  # demonstrations from which the vocabulary is learned
CONCURRENT_EPISODES = 16
WARMUP_STEPS = 50
FINAL_LR_SHARE = 0.02
BETAS = (0.9, 0.98)
MUON_LR_RATIO = 16  # Muon's learning rate over AdamW's: its updates are orthogonal matrices instead of signs
WEIGHT_DECAY = 0.01
GRAD_CLIP = 1.0
NUM_SHARES = 2  # of a batch; fixed, so that the result does not depend on the number of cores
SORT_WINDOW = 8  # how many batches are sorted by length together, so that a batch contains little padding

Example = tuple[list[int], list[int]]
"""token_ids [T] and action_mask [T] of one episode."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmstartReport:
    """The result of a warm start; `describe()` makes it one line."""

    path: Path
    num_parameters: int
    vocab_size: int
    num_demonstrations: int
    demonstrator_reward: float  # mean over the demonstrations
    prompt_tokens: float  # mean
    episode_tokens: float  # mean
    action_tokens: float  # mean
    steps: int
    loss: float  # nats per action token, mean over the last tenth of the steps
    play_s: float
    train_s: float

    def describe(self) -> str:
        """One line for the console."""
        return (
            f"{self.path}: {self.num_parameters / 1e6:.2f} M parameters, vocabulary {self.vocab_size}; "
            f"{self.num_demonstrations} demonstrations (mean reward {self.demonstrator_reward:.2f}, "
            f"{self.episode_tokens:.0f} tokens of which {self.action_tokens:.0f} actions) in {self.play_s:.0f} s; "
            f"{self.steps} steps to loss {self.loss:.3f} in {self.train_s:.0f} s"
        )


async def warmstart(
    config: Config, *, out: Path, sandbox: SandboxClient, progress: Callable[[int, int], None] | None = None
) -> WarmstartReport:
    """Play demonstrations in the sandbox, learn a vocabulary and a model from them, save both in `out`.

    `progress(done, total)` counts sequences, first those played and then those trained on; it is called in the event
    loop. Seeded by `config.seed`. Cancelling takes effect within one optimizer step and leaves nothing in `out`.
    Raises ConfigError if `out` exists or the environment has no demonstrations; SandboxError; EnvError.
    """
    settings = config.model.warmstart
    if settings is None:
        raise ConfigError("model.warmstart: the config has no such section; `warmstart: {}` takes the defaults")
    if out.exists():  # noqa: ASYNC240  (one stat before anything runs)
        raise ConfigError(f"{out} exists already; remove it or choose another model.path")
    total = settings.demonstrations + settings.steps * settings.batch_size
    report = progress or (lambda done, total: None)

    started = time.monotonic()
    env_class = load_env_class(config.env.target, config.env.kwargs)
    async with opened(env_class, sandbox=sandbox) as make_env:
        episodes = await _play(config, settings, env_class, make_env, lambda done: report(done, total))
    played = time.monotonic()
    tools = env_class.tool_schemas()
    tokenizer, turns = _fit_tokenizer(
        episodes[:TOKENIZER_SAMPLE], tools, settings.vocab_size, config.rollout.tool_format
    )
    examples = [_encode(episode, turns, tools, config.rollout.tool_output_tokens) for episode in episodes]
    model = make_model(settings, tokenizer, seed=config.seed)
    loop = asyncio.get_running_loop()

    def on_step(steps: int) -> None:
        loop.call_soon_threadsafe(report, settings.demonstrations + steps * settings.batch_size, total)

    loss = await _in_thread(
        lambda stop: _train(model, examples, settings, config.seed, tokenizer.pad_token_id, stop, on_step)
    )
    save(out, model, tokenizer)
    num_examples = len(examples)
    return WarmstartReport(
        path=out,
        num_parameters=model.num_parameters(),
        vocab_size=len(tokenizer),
        num_demonstrations=num_examples,
        demonstrator_reward=sum(episode.reward for episode in episodes) / num_examples,
        prompt_tokens=sum(mask.index(1) for _, mask in examples) / num_examples,
        episode_tokens=sum(len(ids) for ids, _ in examples) / num_examples,
        action_tokens=sum(sum(mask) for _, mask in examples) / num_examples,
        steps=settings.steps,
        loss=loss,
        play_s=played - started,
        train_s=time.monotonic() - played,
    )


async def _play(
    config: Config,
    settings: WarmstartConfig,
    env_class: type[Env],
    make_env: Callable[[], Env],
    on_done: Callable[[int], None],
) -> list[Episode]:
    """The demonstrations with the tools' real answers, in the order of their tasks."""
    rows = rows_of(env_class, "train", data=config.env.train_data, seed=config.seed + TASK_SEED_OFFSET)
    tasks = list(islice(rows, settings.demonstrations))
    if not tasks:
        raise ConfigError(f"{config.env.target} has no training tasks; set env.train_data: docs/math.md")
    slots = asyncio.Semaphore(CONCURRENT_EPISODES)
    done = 0

    async def one(index: int, task: Task) -> Episode:
        nonlocal done
        script = checked_script(env_class, task, skill=settings.skill, seed=config.seed)
        if not script:
            raise ConfigError(f"{config.env.target} offers no demonstration of task {task.id}; set model.path instead")
        async with slots:
            try:
                async with asyncio.timeout(config.rollout.episode_timeout_s):
                    episode = await play_script(make_env(), task, script, seed=index)
            except TimeoutError as error:
                limit_s = config.rollout.episode_timeout_s
                raise SandboxError(f"demonstration of task {task.id} took more than {limit_s} s") from error
        done += 1
        on_done(done)
        return episode

    try:
        async with asyncio.TaskGroup() as tg:
            jobs = [tg.create_task(one(i, task)) for i, task in enumerate(tasks)]
    except BaseExceptionGroup as errors:
        raise_first(errors)
    return [job.result() for job in jobs]


def _fit_tokenizer(
    episodes: Sequence[Episode], tools: list[dict[str, Any]], vocab_size: int, tool_format: str
) -> tuple[Any, TurnTokenizer]:
    """A vocabulary learned from the texts, split as rollouts split them: prompt, completion, observation, ..."""
    bytes_only = _turn_tokenizer(make_tokenizer([], MIN_VOCAB_SIZE), tool_format)
    texts = []
    for episode in episodes:
        token_ids, action_mask = bytes_only.demonstration(episode.messages, tools)
        for _, run in groupby(zip(token_ids, action_mask, strict=True), key=lambda pair: pair[1]):
            texts.append(bytes_only.decode([token_id for token_id, _ in run]))
    tokenizer = make_tokenizer(texts, vocab_size)
    return tokenizer, _turn_tokenizer(tokenizer, tool_format)


def _turn_tokenizer(tokenizer: Any, tool_format: str) -> TurnTokenizer:
    with tempfile.TemporaryDirectory(prefix="agentrl-tokenizer-") as folder:
        tokenizer.save_pretrained(folder)
        return TurnTokenizer.load(folder).with_tool_format(tool_format)


def _encode(episode: Episode, turns: TurnTokenizer, tools: list[dict[str, Any]], tool_output_tokens: int) -> Example:
    """Token ids and action mask as a rollout records them, with long tool output truncated."""
    messages: list[Message] = [
        replace(m, content=turns.truncate(m.content, tool_output_tokens)) if m.role == "tool" else m
        for m in episode.messages
    ]
    return turns.demonstration(messages, tools)


async def _in_thread(work: Callable[[threading.Event], float]) -> float:
    """Run `work` beside the event loop. Cancelling sets the event passed to it and waits until it returns."""
    stop = threading.Event()
    job = asyncio.ensure_future(asyncio.to_thread(work, stop))
    try:
        return await asyncio.shield(job)
    except asyncio.CancelledError:
        stop.set()
        await asyncio.wait([job])
        raise


def _train(
    model: Any,
    examples: Sequence[Example],
    settings: WarmstartConfig,
    seed: int,
    pad_id: int,
    stop: threading.Event,
    on_step: Callable[[int], None],
) -> float:
    """Train in place with a cosine schedule, on action tokens only. Returns the final loss in nats per token.

    Muon (Jordan et al. 2024) trains the layers' matrices, AdamW the embedding and the norms' weights. Each core
    computes a share of the batch: in a model this small no single operation is worth splitting over cores.
    """
    optimizers = _optimizers(model)
    parameters = list(model.parameters())
    batches = _batches(examples, settings.batch_size, seed)
    # Not the batch's own number of actions: batches hold episodes of one length, so each token of the short ones would
    # weigh more, and the model would imitate those more often than the demonstrator does.
    actions_per_batch = settings.batch_size * sum(sum(mask) for _, mask in examples) / len(examples)
    losses: list[float] = []
    model.train()
    torch.set_num_threads(1)
    with ThreadPoolExecutor(NUM_SHARES) as cores:
        for step in range(settings.steps):
            if stop.is_set():
                break
            lr = settings.lr * _lr_share(step, settings.steps)
            loss = _gradient(model, parameters, next(batches), actions_per_batch, pad_id, cores)
            if not math.isfinite(loss):
                raise ConfigError(f"warm start diverged at step {step}; lower model.warmstart.lr={settings.lr}")
            torch.nn.utils.clip_grad_norm_(parameters, GRAD_CLIP)
            for optimizer, ratio in optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = ratio * lr
                optimizer.step()
            losses.append(loss)
            on_step(step + 1)
    model.eval()
    tail = losses[-max(1, len(losses) // 10) :]
    return sum(tail) / max(1, len(tail))


def _gradient(
    model: Any,
    parameters: Sequence[torch.nn.Parameter],
    batch: list[Example],
    divisor: float,
    pad_id: int,
    cores: Executor,
) -> float:
    """Set every parameter's gradient of the batch's summed loss over `divisor`; returns that loss."""

    def share(examples: list[Example]) -> tuple[float, tuple[torch.Tensor, ...]]:
        loss = _summed_loss(model, examples, pad_id) / divisor
        return loss.item(), torch.autograd.grad(loss, parameters)

    shares = [batch[i::NUM_SHARES] for i in range(NUM_SHARES)]
    done = list(cores.map(share, [examples for examples in shares if examples]))
    for parameter, *parts in zip(parameters, *(gradient for _, gradient in done), strict=True):
        parameter.grad = torch.stack(parts).sum(0) if len(parts) > 1 else parts[0]
    return sum(loss for loss, _ in done)


def _summed_loss(model: Any, batch: Sequence[Example], pad_id: int) -> torch.Tensor:
    """Sum of -log p over the action tokens of the batch; logits are made for those positions only."""
    length = max(len(ids) for ids, _ in batch)
    ids_BT = torch.tensor([ids + [pad_id] * (length - len(ids)) for ids, _ in batch])
    mask_BT = torch.tensor([mask + [0] * (length - len(mask)) for _, mask in batch], dtype=torch.bool)
    # Right padding needs no attention mask: causal attention never looks at it from an action token.
    hidden_BTD = model.model(input_ids=ids_BT[:, :-1], use_cache=False).last_hidden_state
    is_target_BT = mask_BT[:, 1:]
    logits_AV = model.lm_head(hidden_BTD[is_target_BT])
    loss: torch.Tensor = F.cross_entropy(logits_AV, ids_BT[:, 1:][is_target_BT], reduction="sum")
    return loss


def _batches(examples: Sequence[Example], batch_size: int, seed: int) -> Iterator[list[Example]]:
    """Batches of sequences of similar length in random order, epoch after epoch, without end."""
    rng = random.Random(seed)
    window = batch_size * SORT_WINDOW
    while True:
        order = rng.sample(range(len(examples)), len(examples))
        for start in range(0, len(order), window):
            near = sorted(order[start : start + window], key=lambda i: len(examples[i][0]))
            batches = [near[i : i + batch_size] for i in range(0, len(near), batch_size)]
            rng.shuffle(batches)
            for batch in batches:
                yield [examples[i] for i in batch]


def _lr_share(step: int, steps: int) -> float:
    """Linear warm-up, then a cosine from 1 to FINAL_LR_SHARE."""
    cosine = 0.5 * (1 + math.cos(math.pi * step / steps))
    return min(1.0, (step + 1) / WARMUP_STEPS) * (FINAL_LR_SHARE + (1 - FINAL_LR_SHARE) * cosine)


def _optimizers(model: Any) -> list[tuple[torch.optim.Optimizer, float]]:
    """Optimizers, each with the ratio of its learning rate to the configured one.

    Weights of norms are not decayed: that would shrink the signal and not the complexity of the function.
    """
    matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
    norms = [p for p in model.parameters() if p.ndim == 1]
    groups = [
        {"params": [model.get_input_embeddings().weight], "weight_decay": WEIGHT_DECAY},
        {"params": norms, "weight_decay": 0.0},
    ]
    return [
        (torch.optim.Muon(matrices, weight_decay=0.0), MUON_LR_RATIO),
        (torch.optim.AdamW(groups, betas=BETAS, fused=True), 1),
    ]
