"""A pack's parts by rank: together they are the pack, and a head's share is checked against the number of ranks.

tests/trainer/test_equality.py trains with divided packs on two ranks.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from agentrl.errors import ConfigError
from tests.trainer.trainer_builders import config, uneven_episodes
from trainer import packing, ranks
from trainer.gradient import sequence
from trainer.gradient.method_choice import possible
from trainer.packing import Pack

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def pack() -> Pack:
    return packing.join([packing.action_tensors(one, CPU) for one in uneven_episodes()])


@pytest.mark.parametrize("size", [2, 3, 8])
def test_the_parts_are_the_pack(pack: Pack, size: int) -> None:
    parts = [sequence.cut(pack, index=index, size=size) for index in range(size)]
    num_tokens, length = pack.bounds[-1], parts[0].pack.bounds[-1]
    assert {part.pack.bounds[-1] for part in parts} == {length} and 0 <= length * size - num_tokens < size
    for name in ("input_ids_S", "position_ids_S"):
        together = torch.cat([getattr(part.pack, name) for part in parts])
        assert torch.equal(together[:num_tokens], getattr(pack, name))
    predictors = [part.pack.predictor_N + index * length for index, part in enumerate(parts)]
    assert torch.equal(torch.cat(predictors), pack.predictor_N)
    assert torch.equal(torch.cat([part.pack.target_N for part in parts]), pack.target_N)
    for part in parts:
        assert part.whole.bounds == (*pack.bounds[:-1], length * size)
        assert part.action_cuts[-1] == len(pack.target_N)


@pytest.mark.parametrize("size", [2, 3])
def test_every_segment_has_its_tokens_and_actions_in_the_parts_of_their_ranks(pack: Pack, size: int) -> None:
    parts = [sequence.cut(pack, index=index, size=size).pack for index in range(size)]
    for segment in range(pack.num_segments):
        for bounds, whole in (("bounds", pack.bounds), ("action_bounds", pack.action_bounds)):
            lengths = [getattr(one, bounds)[segment + 1] - getattr(one, bounds)[segment] for one in parts]
            added = parts[0].bounds[-1] * size - pack.bounds[-1] if segment == pack.num_segments - 1 else 0
            assert sum(lengths) == whole[segment + 1] - whole[segment] + (added if bounds == "bounds" else 0)


def test_one_rank_has_the_pack_itself(pack: Pack) -> None:
    part = sequence.part_of(pack)
    assert part.pack is pack and part.whole is pack
    values_N = torch.ones(len(pack.target_N))
    assert sequence.whole(values_N, part) is values_N


@pytest.mark.parametrize(
    ("num_queries", "num_keys", "size", "is_refused"),
    [(8, 2, 2, False), (8, 2, 4, False), (8, 3, 2, True), (6, 2, 4, True), (8, 1, 8, False)],
)
def test_heads_that_cannot_be_divided_are_refused(
    monkeypatch: pytest.MonkeyPatch, num_queries: int, num_keys: int, size: int, is_refused: bool
) -> None:
    monkeypatch.setattr(ranks, "sequence_count", lambda: size)
    heads = SimpleNamespace(num_attention_heads=num_queries, num_key_value_heads=num_keys)
    settings: Any = SimpleNamespace(get_text_config=lambda: heads)
    if not is_refused:
        return sequence.check_heads(settings)
    with pytest.raises(ConfigError, match=f"sequence_parallel={size} must divide the model's {num_queries} attention"):
        sequence.check_heads(settings)
    return None


def test_ranks_that_form_no_groups_are_refused(tmp_path: Any) -> None:
    with pytest.raises(ConfigError, match="sequence_parallel=2 must divide num_ranks=3"):
        config(tmp_path, learner={"num_ranks": 3, "sequence_parallel": 2})
    with pytest.raises(ConfigError, match=r"sequence_parallel=2 does not divide the 1 ranks that run"):
        ranks.join(timeout_s=60, sequence_parallel=2)
    assert ranks.sequence_count() == 1


@pytest.mark.parametrize("method", ["one_pass", "one_pass_sharded"])
def test_sums_of_exact_norms_are_refused_where_trajectories_are_divided(tmp_path: Any, method: str) -> None:
    learner = {"num_ranks": 2, "sequence_parallel": 2}
    with pytest.raises(ConfigError, match=f"gradient={method} measures the exact norm of a trajectory that one rank"):
        config(tmp_path, learner={**learner, "gradient": method}, algorithm={"preset": "vcpo"})
    assert possible(config(tmp_path, learner=learner, algorithm={"preset": "vcpo"})) == ("two_pass",)
    assert possible(config(tmp_path, learner=learner, algorithm={"preset": "tis"})) == ("plain",)


def test_columns_of_all_ranks_are_the_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "sequence_count", lambda: 3)
    rows_RD = torch.arange(14.0).view(2, 7)
    found = [sequence.own_columns(rows_RD, index=index) for index in range(3)]
    assert {one.shape for one in found} == {(2, 3)}
    assert torch.equal(torch.cat(found, dim=1)[:, :7], rows_RD) and torch.equal(found[2][:, 1:], torch.zeros(2, 2))
