"""Episodes of the calculator task for S runs at once, sampled from their own weights and their own random numbers.

Episodes of a group that have said the same so far are one row of the batch: the policy is asked once for all of them.
A trained policy rarely differs from itself, so this is most of the gain over one row per episode. What a run samples
does not depend on the runs beside it.

Independent of training.
Shapes: _S runs, _K groups, _B episodes of a run, _U rows (distinct episodes) of a run, _T tokens, _V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks import calculator
from benchmarks.calculator import INDEX, MAX_ACTIONS, MAX_TOKENS, PROMPT_TOKENS
from benchmarks.stability_policy import Cache, decode

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
Floats = NDArray[np.float32]
_TURN_ENDS = (INDEX[";"], INDEX["$"])
_SAMPLED = -1  # no token of the environment waits at this place


@dataclass(frozen=True, slots=True, kw_only=True)
class Episodes:
    """Distinct episodes of every run; unused rows have group -1."""

    ids_SUT: Ints
    acted_SUT: Bools
    logprob_SUT: Floats  # of the policy that sampled; 0 where nothing was sampled
    reward_SU: Floats  # 1 for the right answer, else 0
    error_SU: Ints  # distance of the answer from the right one; NO_ANSWER without an answer
    group_SU: Ints
    row_SB: Ints  # which row each episode is

    @property
    def reward_SB(self) -> Floats:
        """Reward of every episode."""
        return np.take_along_axis(self.reward_SU, self.row_SB, axis=1)

    @property
    def error_SB(self) -> Ints:
        """Error of every episode."""
        return np.take_along_axis(self.error_SU, self.row_SB, axis=1)


def rollout(
    weight_SP: Tensor, operands: Sequence[Sequence[Sequence[int]]], uniform_SBT: Tensor, group_size: int
) -> Episodes:
    """`group_size` episodes for every task of every run; uniform [S, B, MAX_TOKENS] decides what is sampled."""
    sampler = _Sampler(weight_SP, operands, group_size)
    uniforms = uniform_SBT.numpy()
    for t in range(PROMPT_TOKENS, MAX_TOKENS):
        sampler.advance(t, uniforms[:, :, t])
        if not sampler.is_open_SU.any():
            break
        sampler.ask(t)
    return sampler.episodes(t + 1)


class _Sampler:
    def __init__(self, weight_SP: Tensor, operands: Sequence[Sequence[Sequence[int]]], group_size: int) -> None:
        num_runs, num_tasks = len(operands), len(operands[0])
        num_rows = num_tasks * group_size
        self._weight_SP, self._operands = weight_SP, operands
        self.ids_SUT = np.zeros((num_runs, num_rows, MAX_TOKENS), np.int64)
        self._waiting_SUT = np.full((num_runs, num_rows, MAX_TOKENS), _SAMPLED, np.int64)
        self._acted_SUT = np.zeros((num_runs, num_rows, MAX_TOKENS), np.bool_)
        self._logprob_SUT = np.zeros((num_runs, num_rows, MAX_TOKENS), np.float32)
        self._turn_start_SU = np.full((num_runs, num_rows), PROMPT_TOKENS)
        self._reward_SU = np.zeros((num_runs, num_rows), np.float32)
        self._error_SU = np.full((num_runs, num_rows), calculator.NO_ANSWER)
        self._group_SU = np.full((num_runs, num_rows), -1)
        self._group_SU[:, :num_tasks] = np.arange(num_tasks)
        self.is_open_SU = self._group_SU >= 0
        self._num_used_S = np.full(num_runs, num_tasks)
        self._row_SB = np.tile(np.repeat(np.arange(num_tasks), group_size), (num_runs, 1))
        for run, tasks in enumerate(operands):
            for row, task in enumerate(tasks):
                self.ids_SUT[run, row, :PROMPT_TOKENS] = calculator.tokens(calculator.prompt(task))
        self._cache = Cache(num_runs, num_rows)
        prompts = torch.from_numpy(self.ids_SUT[:, :num_tasks, :PROMPT_TOKENS])
        self._log_p_SUV = decode(weight_SP, prompts, 0, self._cache).numpy()

    def ask(self, t: int) -> None:
        """The policy's word on what follows token t, for every row in use."""
        ids_SU1 = torch.from_numpy(self.ids_SUT[:, : self._num_used_S.max(), t, None])
        self._log_p_SUV = decode(self._weight_SP, ids_SU1, t, self._cache).numpy()

    def advance(self, t: int, uniform_SB: Floats) -> None:
        """Token t of every open episode."""
        run_E, episode_E = np.nonzero(np.take_along_axis(self.is_open_SU, self._row_SB, axis=1))
        row_E = self._row_SB[run_E, episode_E]
        p_EV = np.exp(self._log_p_SUV.astype(np.float64)).cumsum(-1)[run_E, row_E]
        sampled_E = (p_EV[:, :-1] < uniform_SB[run_E, episode_E, None] * p_EV[:, -1:]).sum(1)
        waiting_E = self._waiting_SUT[run_E, row_E, t]
        token_E = np.where(waiting_E == _SAMPLED, sampled_E, waiting_E)
        num_rows, size = self.ids_SUT.shape[1], self._log_p_SUV.shape[2]
        key_C, child_E = np.unique((run_E * num_rows + row_E) * size + token_E, return_inverse=True)
        parent_C, token_C = key_C // size, key_C % size
        run_C, parent_C = parent_C // num_rows, parent_C % num_rows
        row_C = self._rows_of_children(run_C, parent_C, t)
        self._row_SB[run_E, episode_E] = row_C[child_E]
        self.ids_SUT[run_C, row_C, t] = token_C
        acted_C = self._waiting_SUT[run_C, row_C, t] == _SAMPLED
        self._acted_SUT[run_C, row_C, t] = acted_C
        self._logprob_SUT[run_C, row_C, t] = np.where(acted_C, self._log_p_SUV[run_C, parent_C, token_C], 0)
        for run, row in zip(*(x[acted_C & np.isin(token_C, _TURN_ENDS)] for x in (run_C, row_C)), strict=True):
            self._end_turn(run, row, t)
        is_full_C = (self._acted_SUT[run_C, row_C, : t + 1].sum(-1) >= MAX_ACTIONS) | (t + 1 > MAX_TOKENS - 6)
        self.is_open_SU[run_C[is_full_C], row_C[is_full_C]] = False

    def episodes(self, length: int) -> Episodes:
        """What was sampled, cut to the longest."""
        used = slice(0, self._num_used_S.max())
        return Episodes(
            ids_SUT=self.ids_SUT[:, used, :length],
            acted_SUT=self._acted_SUT[:, used, :length],
            logprob_SUT=self._logprob_SUT[:, used, :length],
            reward_SU=self._reward_SU[:, used],
            error_SU=self._error_SU[:, used],
            group_SU=self._group_SU[:, used],
            row_SB=self._row_SB,
        )

    def _rows_of_children(self, run_C: Ints, parent_C: Ints, t: int) -> Ints:
        """The first child keeps its parent's row; the others get rows of their own, with all that came before."""
        row_C = parent_C.copy()
        is_new_C = np.zeros(len(row_C), np.bool_)
        is_new_C[1:] = (run_C[1:] == run_C[:-1]) & (parent_C[1:] == parent_C[:-1])
        for child in np.nonzero(is_new_C)[0]:
            row_C[child] = self._num_used_S[run_C[child]]
            self._num_used_S[run_C[child]] += 1
        if is_new_C.any():
            runs, sources, targets = run_C[is_new_C], parent_C[is_new_C], row_C[is_new_C]
            per_token = (self.ids_SUT, self._waiting_SUT, self._acted_SUT, self._logprob_SUT)
            for kept in (*per_token, self._turn_start_SU, self._group_SU, self.is_open_SU):
                kept[runs, targets] = kept[runs, sources]
            self._cache.copy(runs.tolist(), sources.tolist(), targets.tolist())
        return row_C

    def _end_turn(self, run: int, row: int, t: int) -> None:
        turn = calculator.text(self.ids_SUT[run, row, self._turn_start_SU[run, row] : t + 1].tolist())
        if turn.endswith("$"):
            task = self._operands[run][self._group_SU[run, row]]
            self._reward_SU[run, row] = calculator.reward(turn, task)
            self._error_SU[run, row] = calculator.error(turn, task)
            self.is_open_SU[run, row] = False
        else:
            answer = calculator.tokens(calculator.reply(turn))
            end = min(t + 1 + len(answer), MAX_TOKENS)
            self._waiting_SUT[run, row, t + 1 : end] = answer[: end - t - 1]
            self._turn_start_SU[run, row] = t + 1 + len(answer)
