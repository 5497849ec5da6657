"""One checksum of a set of named tensors, the same on CPU and GPU, however the tensors are ordered or sent.

The learner and the engine's worker each compute it over the weights they hold. Independent of models, files and
transports. Imports torch, so only those two may import it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator

import numpy as np
import torch
from torch import Tensor

WORD_BYTES = 8
CHUNK_WORDS = 32_768  # 256 KiB: a chunk and its products stay in a core's own cache
ROWS_ON_GPU = 128  # chunks per kernel: 32 MiB of scratch


class Checksum:
    """A checksum that does not depend on the order of tensors; within a tensor each value counts, and its position.

    Names, dtypes and shapes count too.

    A tensor's bytes are read as 64-bit words w_i in chunks of `CHUNK_WORDS`. Of each chunk two sums are kept, modulo
    2^64:  sum w_i k_i  and  sum (w_i >> 32) k'_i  with fixed odd random k and k' (multilinear hashing, Carter & Wegman
    1979). Odd factors make one changed 32-bit value always seen; any other damage to a chunk passes with a chance of
    about 2^-32. SHA-256 binds the sums of a tensor to its name, dtype and shape, and the tensors' digests are added.
    Integer sums have no rounding, so the order in which a device adds does not matter.

    Scratch memory is one chunk on a CPU and `ROWS_ON_GPU` chunks on a GPU; nothing waits for a GPU before `hexdigest`.

    Example:
        checksum = Checksum()
        checksum.add("lm_head.weight", tensor)
        checksum.hexdigest()  # 64 hexadecimal digits
    """

    def __init__(self) -> None:
        self.num_bytes = 0
        self._total = 0
        self._pending: list[tuple[bytes, Tensor]] = []
        self._keys: dict[torch.device, Tensor] = {}

    def add(self, name: str, tensor: Tensor) -> None:
        """Add `tensor` under `name`. A tensor that is not contiguous is copied temporarily."""
        header = json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode()
        with torch.inference_mode():
            self._pending.append((header, self._sums(tensor.detach().contiguous())))
        self.num_bytes += tensor.nbytes
        if tensor.device.type == "cpu":
            self._settle()

    def through(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield the same pairs, and add each as it passes."""
        for name, tensor in tensors:
            self.add(name, tensor)
            yield name, tensor

    def hexdigest(self) -> str:
        """64 hexadecimal digits over all tensors added so far."""
        self._settle()
        return f"{self._total:064x}"

    def _settle(self) -> None:
        for header, sums in self._pending:
            digest = hashlib.sha256(header + sums.cpu().numpy().astype("<i8").tobytes()).digest()
            self._total = (self._total + int.from_bytes(digest, "big")) % 2**256
        self._pending.clear()

    def _sums(self, tensor: Tensor) -> Tensor:
        """The two sums of every chunk. [2, chunks]"""
        data = tensor.reshape(-1).view(torch.uint8)
        chunk_bytes = CHUNK_WORDS * WORD_BYTES
        num_whole = len(data) // chunk_bytes
        whole, rest = data[: num_whole * chunk_bytes], data[num_whole * chunk_bytes :]
        sums = torch.zeros(2, num_whole + (len(rest) > 0), dtype=torch.int64, device=data.device)
        rows = 1 if data.device.type == "cpu" else ROWS_ON_GPU
        scratch = torch.empty(min(rows, sums.shape[1]), CHUNK_WORDS, dtype=torch.int64, device=data.device)
        for at in range(0, num_whole, rows):
            part = whole[at * chunk_bytes : (at + rows) * chunk_bytes]
            self._sum_rows(_words(part), scratch, sums[:, at : at + rows])
        if len(rest):
            padded = torch.zeros(chunk_bytes, dtype=torch.uint8, device=data.device)
            padded[: len(rest)] = rest
            self._sum_rows(_words(padded), scratch, sums[:, num_whole:])
        return sums

    def _sum_rows(self, words: Tensor, scratch: Tensor, sums: Tensor) -> None:
        keys, high_keys = self._keys_on(words.device)
        scratch = scratch[: len(words)]
        sums[0] = _weighted(words, keys, scratch)
        # In the products above the top bits of a word affect only the top bits of the sum, where pairs of them cancel.
        torch.bitwise_right_shift(words, 32, out=scratch)
        sums[1] = _weighted(scratch, high_keys, scratch)

    def _keys_on(self, device: torch.device) -> Tensor:
        if device not in self._keys:
            self._keys[device] = _odd_numbers(2 * CHUNK_WORDS).view(2, CHUNK_WORDS).to(device)
        return self._keys[device]


def checksum_of(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """`Checksum` of all of them."""
    checksum = Checksum()
    for name, tensor in tensors:
        checksum.add(name, tensor)
    return checksum.hexdigest()


def _weighted(words: Tensor, keys: Tensor, scratch: Tensor) -> Tensor:
    """sum_i words[:, i] * keys[i], modulo 2^64. [chunks]"""
    if len(words) == 1 and words.device.type == "cpu":
        return torch.dot(words[0], keys)[None]  # a third faster; CUDA has none for integers
    return torch.mul(words, keys, out=scratch).sum(dim=1)


def _words(data: Tensor) -> Tensor:
    """Bytes, a whole number of chunks, as 64-bit words. [chunks, CHUNK_WORDS]"""
    if data.storage_offset() % WORD_BYTES or data.data_ptr() % WORD_BYTES:
        data = data.clone()  # a slice of a larger tensor; at most the chunks of one pass are copied
    return data.view(torch.int64).view(-1, CHUNK_WORDS)


def _odd_numbers(num: int) -> Tensor:
    """SplitMix64 (Steele, Lea & Flood 2014), lowest bit set: the same in every version, unlike torch's own
    generator."""
    x = np.arange(1, num + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return torch.from_numpy((x | np.uint64(1)).view(np.int64))
