"""Publishes weights into folders in which, most of the time, only what changed is written: `engine.weight_delta`.

In bfloat16 most weights stay the same in a step of reinforcement learning, because a step is smaller than the distance
to the next number; of a policy with adapters only these change. A publication is a folder with all weights and those
with what changed since, in order; the format is that of agentrl.engine.vllm.changes. Independent of HTTP and training.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from agentrl.engine.checksum import Checksum
from agentrl.engine.vllm import changes
from agentrl.types import Probe, WeightsRef
from trainer.lora import Adapter
from trainer.weights.folder import MAX_SHARD_BYTES, keep_only, new_folder, published, save
from trainer.weights.source import TensorMeta, WeightSource
from trainer.whole_folder import whole_folder

_Made = tuple[list[Path], Checksum, int]
"""A publication: its folders, the checksum of its tensors, the bytes that were written."""


class DeltaFolders:
    """Publications of one learner, made on its first rank.

    Keeps the tensors of the last publication in host memory: the next one is compared with them, and all of them can be
    written again without the other ranks. On the disk stay the folders of this publication and of the one before. A
    publication is whole when the changes since the last whole one have outgrown it.

    Args:
        root: where folders are made. Those that are there stay until the second publication: engines may hold them.
        whole_every: every n-th publication has all weights.

    Example::

        folders = DeltaFolders(Path("/dev/shm/run"), whole_every=8)
        ref = folders.publish(source, policy_version=5, probe=probe)
    """

    def __init__(self, root: Path, *, whole_every: int, max_shard_bytes: int = MAX_SHARD_BYTES) -> None:
        self._root = root
        self._whole_every = whole_every
        self._max_shard_bytes = max_shard_bytes
        self._held: dict[str, Tensor] = {}
        self._whole_bytes = 0
        self._chain: list[Path] = []  # a whole folder and the changes since; empty: the next one is whole
        self._num_changes = self._changed_bytes = 0  # since the whole one
        self._before = set(published(root))  # folders of the publication before, to which engines may have to return
        self._sends_adapters = True
        self._last: WeightsRef | None = None

    def publish(self, source: WeightSource, *, policy_version: int, probe: Probe) -> WeightsRef:
        """Write all weights, or what changed since the last publication. `num_bytes` are those that were written.

        Called on one rank; the others call `source.take_part()`. After a failure the next one is whole.
        """
        chain, self._chain = self._chain, []
        is_last = self._num_changes + 1 >= self._whole_every or self._changed_bytes >= self._whole_bytes
        chain = [] if is_last else chain
        if source.is_adapted and self._sends_adapters:
            made, checksum, num_bytes = self._adapters(source, policy_version, chain[:1])
        elif chain:
            made, checksum, num_bytes = self._changes(source, policy_version, chain)
        else:
            made, checksum, num_bytes = self._whole(source, policy_version)
        self._num_changes = self._num_changes + 1 if chain else 0
        self._chain = made
        keep_only(self._root, {*self._chain, *self._before})
        self._before = set(self._chain)
        self._last = self._ref(policy_version, num_bytes, checksum.hexdigest(), probe)
        return self._last

    def whole_again(self) -> WeightsRef:
        """All weights of the last publication in a new folder, for engines that could not use the changes.

        From then on adapters travel merged: the engines may round another way than the learner when they merge them.
        """
        last = self._last
        assert last is not None
        metadata = [
            TensorMeta(name=name, dtype=tensor.dtype, shape=tuple(tensor.shape)) for name, tensor in self._held.items()
        ]
        folder, checksum = self._saved(last.policy_version, metadata, self._held.items())
        self._chain, self._num_changes, self._changed_bytes = [folder], 0, 0
        self._sends_adapters = False
        self._before.add(folder)
        return self._ref(last.policy_version, checksum.num_bytes, checksum.hexdigest(), last.probe)

    def forget(self) -> None:
        """Make the next publication whole."""
        self._chain = []

    def _whole(self, source: WeightSource, version: int) -> _Made:
        named = ((name, self._hold(name, tensor)) for name, tensor in source)
        folder, checksum = self._saved(version, source.metadata(), named)
        self._whole_bytes, self._changed_bytes = checksum.num_bytes, 0
        return [folder], checksum, checksum.num_bytes

    def _changes(self, source: WeightSource, version: int, chain: list[Path]) -> _Made:
        """What differs from the held tensors; the new ones are held then."""
        checksum, folder = Checksum(), new_folder(self._root, version)
        with whole_folder(folder) as temporary:
            file = _Writer(temporary, max_bytes=self._max_shard_bytes)
            for name, tensor in checksum.through(source):
                new = tensor.cpu().contiguous()
                parts = changes.difference(self._held[name], new)
                held = self._hold(name, new)
                for kind, part in parts.items():
                    # Not a view of the source's tensor, which ZeRO-3 takes back.
                    file.add(changes.key(kind, name), held if kind == changes.WHOLE else part)
            num_bytes = file.finish()
        self._changed_bytes += num_bytes
        return [*chain, folder], checksum, num_bytes

    def _adapters(self, source: WeightSource, version: int, whole: list[Path]) -> _Made:
        """The adapters, beside a folder with the weights that they are added to: a new one unless `whole` has it.

        The checksum is that of the merged weights.
        """
        adapters: dict[str, Adapter] = {}
        frozen: dict[str, Tensor] | None = None if whole else {}
        checksum, num_bytes = Checksum(), 0
        for name, tensor in checksum.through(source.keeping(adapters, frozen)):
            self._hold(name, tensor)
        if frozen is not None:
            named = [(name, frozen.get(name, held)) for name, held in self._held.items()]
            folder, saved = self._saved(version, source.metadata(), named)
            whole, num_bytes, self._whole_bytes = [folder], saved.num_bytes, saved.num_bytes
        folder = new_folder(self._root, version)
        with whole_folder(folder) as temporary:
            file = _Writer(temporary, max_bytes=self._max_shard_bytes)
            for name, adapter in adapters.items():
                file.add(changes.key(changes.DOWN, name), adapter.down_RI)
                file.add(changes.key(changes.UP, name), adapter.up_OR)
                file.add(changes.key(changes.SCALE, name), torch.tensor(adapter.scale, dtype=torch.float64))
            num_bytes += file.finish()
        self._changed_bytes = 0  # each adapter replaces the one before
        return [*whole, folder], checksum, num_bytes

    def _hold(self, name: str, tensor: Tensor) -> Tensor:
        if name not in self._held:
            self._held[name] = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        return self._held[name].copy_(tensor)

    def _saved(
        self, version: int, metadata: Sequence[TensorMeta], named: Iterable[tuple[str, Tensor]]
    ) -> tuple[Path, Checksum]:
        folder = new_folder(self._root, version)
        with whole_folder(folder) as temporary:
            return folder, save(metadata, named, temporary, self._max_shard_bytes)

    def _ref(self, policy_version: int, num_bytes: int, checksum: str, probe: Probe) -> WeightsRef:
        whole, *deltas = map(str, self._chain)
        return WeightsRef(
            policy_version=policy_version,
            num_bytes=num_bytes,
            update_info={"path": whole, "deltas": deltas} if deltas else {"path": whole},
            checksum=checksum,
            probe=probe,
        )


class _Writer:
    """Writes tensors into files of about `max_bytes`, so that host memory holds no more of them."""

    def __init__(self, folder: Path, *, max_bytes: int) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._waiting: dict[str, Tensor] = {}
        self._num_bytes = self._num_files = self._waiting_bytes = 0

    def add(self, name: str, tensor: Tensor) -> None:
        if self._waiting_bytes + tensor.nbytes > self._max_bytes and self._waiting:
            self._write()
        self._waiting[name] = tensor
        self._waiting_bytes += tensor.nbytes

    def finish(self) -> int:
        """Write the rest. Returns the bytes of all tensors. Without any there is one empty file."""
        self._write()
        return self._num_bytes

    def _write(self) -> None:
        from safetensors.torch import save_file

        self._num_files += 1
        save_file(self._waiting, self._folder / f"delta-{self._num_files:05d}.safetensors", {"format": "pt"})
        self._num_bytes += self._waiting_bytes
        self._waiting, self._waiting_bytes = {}, 0
