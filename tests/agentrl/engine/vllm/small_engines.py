"""Workers of engines in threads of this process: our transfer engines over a small model that vLLM can reload."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from vllm.distributed.weight_transfer.base import ParamMeta
from vllm.model_executor.model_loader.reload import record_metadata_for_reloading
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

from agentrl.engine.checksum import checksum_of
from agentrl.engine.transfer_group import share_of
from agentrl.engine.vllm.gloo_group import GroupError

CPU = torch.device("cpu")


class Slice:
    """A weight loader that takes this worker's rows, as vLLM's do under tensor parallelism."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.__name__ = "slice_loader"

    def __call__(self, param: Tensor, loaded_weight: Tensor) -> None:
        default_weight_loader(param, loaded_weight.chunk(self.size)[self.rank])


class SmallModel(nn.Module):
    """Three layers, of which `rank` of `size` workers holds its rows."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        super().__init__()
        self.embed = nn.Linear(16, 64 // size, bias=False)
        self.layers = nn.ModuleList(nn.Linear(64, 64 // size, bias=False) for _ in range(4))
        for parameter in self.parameters():
            parameter.requires_grad_(False)
            parameter.weight_loader = Slice(rank, size)  # type: ignore[attr-defined]

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            param: Any = self.get_parameter(name)  # again each time: vLLM replaces them while it loads
            param.weight_loader(param, tensor)


class Source:
    """A `WeightSource` of one value everywhere plus each element's index."""

    def __init__(self, value: float, model: nn.Module | None = None) -> None:
        self._shapes = {name: tuple(p.shape) for name, p in (model or SmallModel()).named_parameters()}
        self.value = value
        self.num_sent = 0

    def metadata(self) -> list[ParamMeta]:
        return [ParamMeta(name, torch.float32, shape) for name, shape in self._shapes.items()]

    def __iter__(self) -> Any:
        for name, shape in self._shapes.items():
            self.num_sent += 1
            yield name, torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape) + self.value


class Engine:
    """One vLLM engine: its workers, which all do what a route of the server asks, as in vLLM's `gpu_worker.py`."""

    def __init__(self, engine_class: Any, folder: Path, *, tensor_parallel: int = 1) -> None:
        save_file(dict(SmallModel().state_dict()), folder / "model.safetensors")
        self.workers = [self._worker(engine_class, folder, rank, tensor_parallel) for rank in range(tensor_parallel)]

    @staticmethod
    def _worker(engine_class: Any, folder: Path, rank: int, size: int) -> Any:
        model = SmallModel(rank, size)
        record_metadata_for_reloading(model)
        config = SimpleNamespace(
            parallel_config=SimpleNamespace(rank=rank, world_size=size, data_parallel_index=0),
            model_config=SimpleNamespace(model=str(folder), revision=None, dtype=torch.float32),
        )
        return engine_class(SimpleNamespace(), config, CPU, model)

    def each(self, method: str, *args: Any) -> None:
        with ThreadPoolExecutor(len(self.workers)) as threads:
            calls = [threads.submit(getattr(worker, method), *args) for worker in self.workers]
        for call in calls:
            call.result()

    def init(self, init_info: dict[str, Any]) -> None:
        self.each("init_transfer_engine", self.workers[0].parse_init_info(init_info))

    def update(self, update_info: dict[str, Any]) -> None:
        for method, *args in (("start_weight_update",), ("update_weights", update_info), ("finish_weight_update",)):
            self.each(method, *args)

    @property
    def checksums(self) -> set[str]:
        return {worker.checksum for worker in self.workers}

    def weights(self) -> dict[str, Tensor]:
        """The whole model, put together from the rows of all workers."""
        names = [name for name, _ in self.workers[0].model.named_parameters()]
        return {name: torch.cat([w.model.get_parameter(name) for w in self.workers]) for name in names}

    @property
    def is_whole(self) -> bool:
        """Whether no layer is on the meta device."""
        return not any(p.is_meta for worker in self.workers for p in worker.model.parameters())


def assert_hold(engine: Engine, value: float) -> None:
    """Every weight is that of `Source(value)`, and every worker reports its checksum."""
    expected = dict(Source(value))
    for name, tensor in engine.weights().items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=0)
    assert engine.checksums == {checksum_of(expected.items())}
    assert engine.is_whole


class Orchestrator:
    """vLLM's client protocol, which asks all engines at once as the pool does."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        self.engines = list(engines)
        self.calls: list[Future[None]] = []
        self.is_updating = False

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        number = len(self.engines)
        self._begin([lambda e=e, i=i: e.init(share_of(init_info, i, number)) for i, e in enumerate(self.engines)])
        self._first()

    def start_weight_update(self) -> None: ...

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self._begin([lambda e=e: e.update(update_info) for e in self.engines])
        self.is_updating = True
        self._first()

    def finish_weight_update(self, weight_version: str | None = None) -> None: ...

    def _begin(self, calls: Sequence[Callable[[], None]]) -> None:
        threads = ThreadPoolExecutor(len(calls), thread_name_prefix="route")
        self.calls = [threads.submit(call) for call in calls]
        threads.shutdown(wait=False)

    def _first(self) -> None:
        """Return when all have ended. Raises the first error at once: the others may wait for the sender."""
        for call in wait(self.calls, return_when=FIRST_EXCEPTION).done:
            call.result()

    def settled(self) -> list[BaseException | None]:
        """The error of each engine's last call, once all have ended."""
        return [call.exception(timeout=30) for call in self.calls]


def assert_noticed_by_all_that_one_does_not_join(engines: Sequence[Engine], sender: Callable[..., Any]) -> None:
    """The second engine refuses; the sender and the first one know it long before the deadline of 600 s."""

    def refuses(init_info: dict[str, Any]) -> None:
        raise ConnectionError("nothing listens there")

    engines[1].init = refuses  # type: ignore[method-assign]
    orchestrator = Orchestrator(engines)
    with pytest.raises(ConnectionError, match="nothing listens"):
        sender(orchestrator, Source(1.0), timeout_s=600.0)
    assert isinstance(orchestrator.settled()[0], GroupError)
