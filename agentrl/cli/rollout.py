"""What `agentrl rollout` prints of the episodes that it played."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console

from agentrl import config as configs
from agentrl.report.episode_text import show_episode, show_tokens, summary, task_line
from agentrl.types import TrajectoryGroup

Decode = Callable[[Sequence[int]], str]


def decoder(config: Path, overrides: Sequence[str], *, model: str | None, tokenizer: str | None) -> Decode:
    """Decodes what `model`, or the config's, sampled. Raises ConfigError."""
    from agentrl.api.playing import PlayOptions, Request
    from agentrl.tokens.tokenizer import load_tokenizer

    options = PlayOptions(model=model, tokenizer=tokenizer)
    played = Request.from_options(configs.load(config, overrides), options, environ=os.environ)
    return load_tokenizer(played.config.model, played.tokenizer).decode


def show_groups(groups: Sequence[TrajectoryGroup], *, whole: bool, decode: Decode | None) -> None:
    """Print the episodes: one line for each, all their messages, or all their tokens."""
    console = Console(highlight=False)
    for group in groups:
        if not whole:
            console.print(task_line(group.task))
        for episode in group.episodes:
            if whole:
                show_episode(console, group.task, episode)
            if decode is not None:
                show_tokens(console, episode, decode)
            if not whole and decode is None:
                console.print(summary(episode, answer=group.task.answer))
