"""Logprobs against the model's own logits; the split of a batch over ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from trainer_builders import completion, episode, group, mixed_groups, plain_logprobs, trajectory

from agentrl.errors import ConfigError, LearnerError
from agentrl.types import Turn
from trainer.logprobs import action_logprobs, check_head
from trainer.packing import action_tensors, num_tokens, share_of_rank

CPU = torch.device("cpu")


@pytest.mark.parametrize("chunk_tokens", [1, 3, 1024])
def test_chunked_logprobs_and_their_gradient_equal_the_models_own(tiny_model: Any, chunk_tokens: int) -> None:
    member = episode("a", reward=1.0, shape=((6, 4), (5, 7), (1, 1)))
    positions = [t - 1 for t, acted in enumerate(member.action_mask()) if acted]
    theirs = plain_logprobs(tiny_model, member.token_ids())[positions]
    ours, _ = action_logprobs(tiny_model, action_tensors(member, CPU), chunk_tokens=chunk_tokens)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-6)
    weight = tiny_model.model.embed_tokens.weight
    (ours_grad,) = torch.autograd.grad(ours.sum(), weight)
    (theirs_grad,) = torch.autograd.grad(theirs.sum(), weight)
    torch.testing.assert_close(ours_grad, theirs_grad, rtol=1e-4, atol=1e-5)


def test_entropy_of_a_uniform_policy_is_log_vocabulary(tiny_model: Any) -> None:
    with torch.no_grad():
        tiny_model.get_output_embeddings().weight.zero_()
    _, entropy_N = action_logprobs(tiny_model, action_tensors(episode("a", reward=0.0), CPU))
    torch.testing.assert_close(entropy_N, torch.full_like(entropy_N, tiny_model.config.vocab_size).log())


def test_a_head_with_more_than_a_matrix_is_refused_by_name(tiny_model: Any) -> None:
    check_head(tiny_model)
    whole = tiny_model.forward
    tiny_model.forward = lambda **inputs: _softcapped(whole(**inputs))
    with pytest.raises(ConfigError, match="Qwen3ForCausalLM"):
        check_head(tiny_model)


def _softcapped(output: Any) -> Any:
    output.logits = 0.1 * torch.tanh(output.logits / 0.1)
    return output


def test_an_episode_without_a_prompt_is_refused() -> None:
    with pytest.raises(LearnerError, match="headless"):
        action_tensors(
            trajectory("headless", [Turn(observation_ids=(), completion=completion((1,), (-1.0,), 0))], reward=0.0), CPU
        )


def test_every_group_goes_to_exactly_one_rank_and_loads_are_even() -> None:
    groups = [group(i, [episode("a", reward=0.0, shape=((n, n),))]) for i, n in enumerate((40, 10, 10, 10, 10))]
    shares = [share_of_rank(groups, rank=rank, num_ranks=2) for rank in range(2)]
    assert sorted(g.group_id for share in shares for g in share) == [0, 1, 2, 3, 4]
    assert [sum(map(num_tokens, share)) for share in shares] == [80, 80]


def test_the_split_does_not_depend_on_the_order_of_groups(tiny_model: Any) -> None:
    groups = mixed_groups(tiny_model)
    assert share_of_rank(groups, rank=1, num_ranks=2) == share_of_rank(groups[::-1], rank=1, num_ranks=2)
