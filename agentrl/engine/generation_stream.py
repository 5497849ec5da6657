"""One generation as it arrives, and the part of it that is certain if the engine dies. Independent of the network.

vLLM reports only in the last event which weights sampled which tokens. If that event never comes, the client knows from
its own side: tokens that had arrived before a weight update began were sampled by the weights before that update.
"""

from __future__ import annotations

from collections.abc import Sequence

from agentrl.engine.vllm_schema import Delta
from agentrl.types import Completion, FinishReason, Sampling, VersionSpan

INITIAL_LABEL = "default"  # vLLM's version label until a client sets one
LOGPROB_UNKNOWN = -9999.0  # what vLLM sends for NaN, -inf, or a token it has no entry for


class GenerationStream:
    """The answer to one request, as it arrives; the request began under the weights of `version`.

    Example:
        stream = GenerationStream(version=3)
        stream.extend(delta)  # for each event
        completion = stream.completion()  # or stream.certain_part(sampling) after a failure
    """

    def __init__(self, version: int) -> None:
        self._version = version
        self._token_ids: list[int] = []
        self._logprobs: list[float] = []
        self._num_certain: int | None = None
        self._end: Delta | None = None

    def weights_change(self) -> None:
        """A weight update begins: tokens that arrive from now on may be from the old weights or from the new."""
        if self._num_certain is None:
            self._num_certain = len(self._token_ids)

    def extend(self, delta: Delta) -> None:
        """Append the tokens of one event. Raises ValueError when ids and scored ids differ or a logprob is
        impossible."""
        if [entry.token_id for entry in delta.logprobs.content] != delta.token_ids:
            raise ValueError("the logprobs are not those of the tokens")
        if not all(LOGPROB_UNKNOWN < entry.logprob <= 0 for entry in delta.logprobs.content):
            raise ValueError("a token's logprob is positive or not finite: are the model's logits NaN or infinite?")
        if self._end is not None:
            raise ValueError("tokens after the last event")
        self._token_ids += delta.token_ids
        self._logprobs += [entry.logprob for entry in delta.logprobs.content]
        if delta.finish_reason is not None:
            self._end = delta

    def completion(self) -> Completion:
        """The whole answer. Raises ValueError when it has no end or is inconsistent; UnlabelledWeights."""
        if self._end is None:
            raise ValueError("the answer has no end")
        if any(span.version == INITIAL_LABEL for span in self._end.weight_versions or ()):
            self._num_certain = 0
            raise UnlabelledWeights
        return Completion(
            token_ids=tuple(self._token_ids),
            behavior_logprobs=tuple(self._logprobs),
            version_spans=tuple(
                VersionSpan(version=version_of(span.version), start=span.start, end=span.end)
                for span in self._end.weight_versions or ()
            ),
            finish_reason=FinishReason(self._end.finish_reason or ""),
        )

    def certain_part(self, sampling: Sampling) -> Completion:
        """The tokens of an interrupted answer whose version is certain, as an aborted completion.

        Where stop strings were requested, the last tokens that could hold the beginning of one are dropped: the request
        that continues the answer would not recognise it.
        """
        num_tokens = len(self._token_ids) if self._num_certain is None else self._num_certain
        num_tokens = max(0, num_tokens - max((len(text.encode()) - 1 for text in sampling.stop), default=0))
        return Completion(
            token_ids=tuple(self._token_ids[:num_tokens]),
            behavior_logprobs=tuple(self._logprobs[:num_tokens]),
            version_spans=(VersionSpan(version=self._version, start=0, end=num_tokens),) if num_tokens else (),
            finish_reason=FinishReason.ABORT,
        )


def joined(parts: Sequence[Completion]) -> Completion:
    """The parts of one generation, each of which continues the one before, as one completion; it ends as the last
    part."""
    if len(parts) == 1:
        return parts[0]
    spans: list[VersionSpan] = []
    for part in parts:
        start = spans[-1].end if spans else 0
        for span in part.version_spans:
            if spans and spans[-1].version == span.version:
                spans[-1] = VersionSpan(version=span.version, start=spans[-1].start, end=start + span.end)
            else:
                spans.append(VersionSpan(version=span.version, start=start + span.start, end=start + span.end))
    return Completion(
        token_ids=tuple(token for part in parts for token in part.token_ids),
        behavior_logprobs=tuple(logprob for part in parts for logprob in part.behavior_logprobs),
        version_spans=tuple(spans),
        finish_reason=parts[-1].finish_reason,
    )


class UnlabelledWeights(Exception):
    """The server does not know the version of its weights. Example: it has just been restarted."""


def version_of(label: str) -> int:
    """vLLM's weight label as a policy version. Raises ValueError when it is not one."""
    if not (label.isascii() and label.isdigit()):
        raise ValueError(
            f"weight version {label!r} is not a policy version: was the engine restarted, or updated by another client?"
        )
    return int(label)
