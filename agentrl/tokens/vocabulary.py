"""Whether two models read token ids alike: a teacher or a reference scores the ids that the policy sampled.

Independent of weights and of the rows that an embedding is padded to.
"""

from __future__ import annotations

from typing import Any

from agentrl.errors import ConfigError

MAX_NAMED = 3


def check_same_vocabulary(policy: str, other: str, *, key: str) -> None:
    """Raises ConfigError, which names the first ids that differ, unless `other` reads every id of `policy` alike.

    Further tokens of `other` are permitted.

    Args:
        policy: folder or hub name of the model that samples.
        other: that of the model which scores.
        key: the config's key that names `other`.

    Example:
        check_same_vocabulary("Qwen/Qwen3-0.6B", "Qwen/Qwen3-8B", key="model.reference")
    """
    own, others = _tokens(policy, "model.path"), _tokens(other, key)
    if differing := sorted(index for index, token in own.items() if others.get(index) != token):
        named = "; ".join(
            f"{index} is {own[index]!r} there and {others.get(index, 'no token')!r} here"
            for index in differing[:MAX_NAMED]
        )
        raise ConfigError(
            f"{key}={other} has another vocabulary than model.path={policy}: {len(differing):,} of {len(own):,} ids "
            f"differ ({named}). It would score another text than the policy wrote; give a model with the policy's "
            "tokenizer, such as a larger one of its family"
        )


def _tokens(path: str, key: str) -> dict[int, str]:
    from transformers import PreTrainedTokenizerFast  # AutoTokenizer imports torch

    try:
        tokenizer: Any = PreTrainedTokenizerFast.from_pretrained(path)
    except (OSError, ValueError, TypeError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"{key}={path}: its vocabulary cannot be read: {reason}; copy its tokenizer too") from error
    return {index: token for token, index in tokenizer.get_vocab().items()}
