"""What `agentrl rollout` prints of the episodes that it played."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console

from agentrl import config as configs
from agentrl.report.episode_text import show_episode, show_tokens, summary, task_line
from agentrl.types import TrajectoryGroup

Decode = Callable[[Sequence[int]], str]


def decoder(config: Path, overrides: Sequence[str], *, model: str | None, tokenizer: str | None) -> Decode:
    """Decodes what `model`, or the config's, sampled. Raises ConfigError."""
    from agentrl.tokens.tokenizer import load_tokenizer
    from agentrl.training.model_folder import exported_weights

    settings = configs.load(config, overrides)
    is_folder = model is not None and not model.startswith(("http://", "https://"))
    folder = exported_weights(model, out_dir=settings.out_dir) if model and is_folder else settings.model.path
    return load_tokenizer(settings.model, tokenizer or folder).decode


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
