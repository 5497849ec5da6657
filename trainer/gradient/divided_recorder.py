"""Exact norms of trajectories whose tokens are divided among ranks (trainer/gradient/sequence.py).

In the backward each rank is given all tokens of the pack and 1/n of the columns: of a linear map's output gradient, of
an embedding's, of a normalization's, and of the head's input. It measures the norms of these blocks of the weights'
gradients, with the bounds of the whole pack; the squares of all ranks are added at the end. For a linear map from I to
O of which a rank has S/n tokens, it receives S (I + O / n) numbers.

Keeps no sums. Independent of passes and of how a norm is measured.
"""

from __future__ import annotations

from torch import Tensor

from trainer import ranks
from trainer.gradient import sequence
from trainer.gradient.recorder import Recorder


class DividedRecorder(Recorder):
    """A Recorder whose `bounds` and `action_bounds` are those of `Part.whole`.

    Every rank of a sequence group makes the same calls. Example: see `Recorder`.
    """

    @property
    def has_all_tokens(self) -> bool:
        """The head passes the gradients of all action tokens, and this rank's columns of its input."""
        return True

    @property
    def norm2_n(self) -> Tensor:
        """As in Recorder, over the blocks of all ranks."""
        norm2_n = super().norm2_n
        ranks.add_up_sequence(norm2_n)
        return norm2_n

    def linear(self, weight: Tensor, grad_SO: Tensor, input_SI: Tensor, source: int) -> None:
        """As in Recorder, from this rank's tokens."""
        if self.index_of(weight) is not None:
            grad_SO = sequence.all_tokens_of_columns(grad_SO)
            super().linear(weight, grad_SO, sequence.all_tokens(input_SI), source)

    def vectors(self, parameter: Tensor, grad_RD: Tensor) -> None:
        """As in Recorder, from this rank's tokens."""
        if self.index_of(parameter) is not None or self.has_only_vectors:
            super().vectors(parameter, sequence.all_tokens_of_columns(grad_RD))

    def embedding(self, weight: Tensor, ids_S: Tensor, grad_SD: Tensor, padding_id: int | None) -> None:
        """As in Recorder, from this rank's tokens."""
        if self.index_of(weight) is not None:
            grad_SD = sequence.all_tokens_of_columns(grad_SD)
            super().embedding(weight, sequence.all_tokens(ids_S), grad_SD, padding_id)
