"""A Gymnasium text space for every text, also in the shared memory of AsyncVectorEnv. Independent of environments.

Gymnasium's own space allows listed characters only, and AsyncVectorEnv reads its texts once, before there are any.
"""

from __future__ import annotations

import string
from collections.abc import Sequence
from multiprocessing.sharedctypes import SynchronizedArray
from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.vector.utils import create_shared_memory, read_from_shared_memory, write_to_shared_memory
from numpy.typing import NDArray

SAMPLE_CHARS = 64
_Memory = SynchronizedArray  # of int32: per environment a length, then that many code points


class UnicodeText(spaces.Text):
    """Texts of up to `max_length` characters, with any characters. Samples are short printable ASCII.

    >>> "Größe: 1 µm" in UnicodeText(max_length=100)
    True
    """

    def __init__(self, max_length: int, *, seed: int | np.random.Generator | None = None) -> None:
        super().__init__(max_length, min_length=0, charset=string.printable, seed=seed)

    def sample(self, mask: Any = None, probability: Any = None) -> str:
        """Up to 64 characters. Raises ValueError for a mask: it would need an entry for every character."""
        if mask is not None or probability is not None:
            raise ValueError("samples of UnicodeText take no mask: it would need an entry for every character")
        length = int(self.np_random.integers(0, min(self.max_length, SAMPLE_CHARS) + 1))
        return "".join(self.np_random.choice(list(string.printable), size=length))

    def contains(self, x: Any) -> bool:
        """Whether `x` is a text that is not too long."""
        return isinstance(x, str) and len(x) <= self.max_length

    def __repr__(self) -> str:
        return f"UnicodeText({self.max_length})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, UnicodeText) and self.max_length == other.max_length

    __hash__ = None  # type: ignore[assignment]


class _Texts(Sequence[str]):
    """The memory's current texts. A copy does not change."""

    def __init__(self, rows: NDArray[np.int32]) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: Any) -> Any:
        length, *_ = row = self._rows[index]
        return row[1 : 1 + length].tobytes().decode("utf-32-le", errors="surrogatepass")

    def __deepcopy__(self, memo: dict[int, Any]) -> tuple[str, ...]:
        return tuple(self)


def _rows(space: UnicodeText, memory: _Memory[int]) -> NDArray[np.int32]:
    return np.frombuffer(memory.get_obj(), dtype=np.int32).reshape(-1, 1 + space.max_length)  # type: ignore[call-overload,no-any-return]


@create_shared_memory.register(UnicodeText)
def _create(space: UnicodeText, n: int = 1, ctx: Any = None) -> _Memory[int]:
    return ctx.Array("i", n * (1 + space.max_length))  # type: ignore[no-any-return]


@read_from_shared_memory.register(UnicodeText)
def _read(space: UnicodeText, shared_memory: _Memory[int], n: int = 1) -> Sequence[str]:
    return _Texts(_rows(space, shared_memory))


@write_to_shared_memory.register(UnicodeText)
def _write(space: UnicodeText, index: int, value: str, shared_memory: _Memory[int]) -> None:
    points = np.frombuffer(value.encode("utf-32-le", errors="surrogatepass"), dtype=np.int32)
    row = _rows(space, shared_memory)[index]
    row[1 : 1 + len(points)] = points
    row[0] = len(points)
