"""Packed log-probabilities against the model's own logits, one episode at a time."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.trainer.trainer_builders import ARCHITECTURES, action_logprobs, architecture, episode, uneven_episodes
from trainer.gradient import attention
from trainer.gradient.logit_rule import LogitRule
from trainer.gradient.logprobs import _Head, score
from trainer.gradient.recorded_modules import recording, tied_weight
from trainer.gradient.recorder import Recorder
from trainer.gradient.sums import GradientSums
from trainer.packing import action_tensors, join

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("chunk_tokens", [1, 7, None])
def test_packed_logprobs_equal_unpacked_ones(name: str, chunk_tokens: int | None) -> None:
    """Within 1e-5 nats in float32."""
    model, episodes = architecture(name), uneven_episodes()
    theirs = torch.cat([action_logprobs(model, one) for one in episodes])
    attention.install(model)
    ours = score(model, join([action_tensors(one, CPU) for one in episodes]), chunk_tokens=chunk_tokens).logprob_N
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


def test_packed_logprobs_in_bfloat16_differ_by_rounding() -> None:
    """Within 0.03 nats of the same bfloat16 model unpacked: a bfloat16 logit of this size is 0.008 wide."""
    model, episodes = architecture("Qwen3").bfloat16(), uneven_episodes()
    theirs = torch.cat([action_logprobs(model, one) for one in episodes])
    attention.install(model)
    ours = score(model, join([action_tensors(one, CPU) for one in episodes])).logprob_N
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0.03)


def test_entropy_and_squared_probabilities_equal_the_softmaxs(tiny_model: Any) -> None:
    one = episode("a", reward=0.0)
    acting = [t - 1 for t, acted in enumerate(one.action_mask()) if acted]
    logits_TV = tiny_model(input_ids=torch.tensor([one.token_ids()]), use_cache=False).logits[0]
    pi_NV = logits_TV[acting].detach().double().softmax(-1)
    attention.install(tiny_model)
    scores = score(tiny_model, join([action_tensors(one, CPU)]), chunk_tokens=3)
    torch.testing.assert_close(scores.entropy_N.double(), torch.special.entr(pi_NV).sum(-1), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(scores.sum_pi2_N.double(), pi_NV.square().sum(-1), rtol=1e-5, atol=1e-7)


def test_entropy_of_a_uniform_policy_is_log_vocabulary(tiny_model: Any) -> None:
    with torch.no_grad():
        tiny_model.get_output_embeddings().weight.zero_()
    entropy_N = score(tiny_model, join([action_tensors(episode("a", reward=0.0), CPU)])).entropy_N
    torch.testing.assert_close(entropy_N, torch.full_like(entropy_N, tiny_model.config.vocab_size).log())


def test_without_a_recorder_there_is_no_graph(tiny_model: Any) -> None:
    assert not score(tiny_model, join([action_tensors(episode("a", reward=0.0), CPU)])).logprob_N.requires_grad


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that any operation inside makes."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for one in made if isinstance(made, tuple | list) else [made]:
            if isinstance(one, torch.Tensor):
                self.elements = max(self.elements, one.numel())
        return made


@pytest.mark.parametrize("has_norms", [True, False])
def test_no_tensor_is_as_large_as_tokens_times_vocabulary(has_norms: bool) -> None:
    """Forward and backward: the largest is the chunk of logits or a weight."""
    model, chunk_tokens = architecture("Qwen3-tied"), 8
    attention.install(model)
    pack = join([action_tensors(one, CPU) for one in uneven_episodes()])
    sums = GradientSums(list(model.parameters()), has_scores=has_norms)
    sums.reset()
    recorder = Recorder(
        sums,
        bounds=pack.bounds if has_norms else (0, pack.bounds[-1]),
        action_bounds=pack.action_bounds if has_norms else (0, pack.action_bounds[-1]),
        has_norms=has_norms,
        tied_weight=tied_weight(model),
        device=CPU,
    )
    with Largest() as largest, recording(model, recorder):
        logprob_N = score(model, pack, recorder, chunk_tokens=chunk_tokens).logprob_N
        torch.autograd.backward(logprob_N, torch.ones_like(logprob_N))
    vocab_size = model.config.vocab_size
    assert largest.elements == max(chunk_tokens * vocab_size, *(p.numel() for p in model.parameters()))
    assert largest.elements < len(pack.target_N) * vocab_size / 2


def test_entropy_over_a_large_vocabulary_is_as_exact_as_float32_logits_allow() -> None:
    """Against float64 from the same logits. Each log pi is off by |log sum| + |log pi| + 40 times 2^-24.

    40 covers the exponentials and their sum. Entropy is a sum of pi log pi, all of one sign, so it is off by H + 1
    times that, whatever the size of the vocabulary. One float32 sum over 50,000 products is 20 times further off.
    """
    generator = torch.Generator().manual_seed(0)
    head = torch.nn.Linear(16, 50_000, bias=False)
    with torch.no_grad():
        head.weight.normal_(generator=generator)
    hidden_ND = torch.randn(9, 16, generator=generator)
    targets = torch.randint(0, 50_000, (9,), generator=generator)
    part = SimpleNamespace(pack=SimpleNamespace(target_N=targets))
    logprob_N, entropy_N, sum_pi2_N = _Head.apply(hidden_ND, None, None, head, part, 4, None, LogitRule())
    log_pi_NV = (hidden_ND @ head.weight.t()).detach().double().log_softmax(-1)
    log_sum_N = (hidden_ND @ head.weight.t()).detach().double().logsumexp(-1)
    exact_N = torch.special.entr(log_pi_NV.exp()).sum(-1)
    off_N = (log_sum_N.abs() + log_pi_NV.abs().amax(-1) + 40) * 2.0**-24
    assert bool(((entropy_N.double() - exact_N).abs() < (exact_N + 1) * off_N).all())
    exact_N = log_pi_NV.exp().square().sum(-1)
    assert bool(((sum_pi2_N.double() - exact_N).abs() < 2 * off_N * exact_N).all())
    assert bool(((logprob_N.double() - log_pi_NV.gather(1, targets[:, None])[:, 0]).abs() < off_N).all())


def test_logits_of_a_bfloat16_head_are_not_rounded_to_bfloat16() -> None:
    """Against float64 from the same hidden states and weights: what bfloat16 logits are off by, float32 ones are not.

    The logits' spread of 8 gives an entropy of 0.9 nats. 512 tokens are sampled from the exact distribution.
    """
    generator = torch.Generator().manual_seed(0)
    head = torch.nn.Linear(256, 8000, bias=False, dtype=torch.bfloat16)
    with torch.no_grad():
        head.weight.normal_(std=1 / 16, generator=generator)
    hidden_ND = 8 * torch.randn(512, 256, generator=generator).bfloat16()
    exact_NV = (hidden_ND.double() @ head.weight.detach().double().t()).log_softmax(-1)
    targets = exact_NV.exp().multinomial(1, generator=generator)
    exact_N = exact_NV.gather(1, targets)[:, 0]
    ours_N, *_ = _Head.apply(
        hidden_ND,
        None,
        None,
        head,
        SimpleNamespace(pack=SimpleNamespace(target_N=targets[:, 0])),
        100,
        None,
        LogitRule(),
    )
    rounded_N = head(hidden_ND).float().log_softmax(-1).gather(1, targets)[:, 0].detach()
    assert float((rounded_N - exact_N).square().mean().sqrt()) > 0.02
    assert float((ours_N - exact_N).abs().max()) < 1e-4
    assert float((ours_N.double() - exact_N).sum().abs()) < 5e-3 < float((rounded_N.double() - exact_N).sum().abs())


@pytest.mark.parametrize("chunk_tokens", [3, 100])
@pytest.mark.parametrize(
    ("rule", "has_bias"),
    [(LogitRule(), False), (LogitRule(), True), (LogitRule(scale=0.25), True), (LogitRule(scale=3.0, cap=2.0), True)],
)
def test_the_heads_gradients_are_autograds(rule: LogitRule, has_bias: bool, chunk_tokens: int) -> None:
    """Of hidden states, weight and bias, from seeds on log-probabilities and entropies, against float64."""
    torch.manual_seed(0)
    head = torch.nn.Linear(8, 50, bias=has_bias)
    hidden_ND = torch.randn(7, 8, requires_grad=True)
    target_N, seed_N, entropy_seed_N = torch.randint(0, 50, (7,)), torch.randn(7), torch.randn(7)
    inputs = [hidden_ND, *head.parameters()]
    logprob_N, entropy_N, _ = _Head.apply(
        hidden_ND,
        head.weight,
        head.bias,
        head,
        SimpleNamespace(pack=SimpleNamespace(target_N=target_N)),
        chunk_tokens,
        None,
        rule,
    )
    ours = torch.autograd.grad([logprob_N, entropy_N], inputs, [seed_N, entropy_seed_N])
    wide = head.double()
    logits_NV = rule.scale * wide(hidden_ND.double())
    log_pi_NV = (logits_NV if rule.cap is None else rule.cap * torch.tanh(logits_NV / rule.cap)).log_softmax(-1)
    value = log_pi_NV.gather(1, target_N[:, None])[:, 0] @ seed_N.double()
    value = value - (log_pi_NV.exp() * log_pi_NV).sum(-1) @ entropy_seed_N.double()
    theirs = torch.autograd.grad(value, [hidden_ND, *wide.parameters()])
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.double(), other.double(), rtol=1e-4, atol=1e-6)
