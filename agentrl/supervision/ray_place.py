"""Starts the parts of a run on the nodes of a Ray cluster.

Ray Core places, watches and ends processes and carries their log lines; no state of the run and no result passes
through it. Each start has a placement group of its own, with one actor (part_host.py) on each of its machines.
Independent of what the parts do.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from agentrl.config.ray import PartName, RayConfig
from agentrl.errors import InfraError
from agentrl.supervision.child import Child, Command, Process, Spot, arguments_of
from agentrl.supervision.part_host import GUARD_KILLED, CannotStart, PartHost
from agentrl.supervision.place import Needs
from agentrl.supervision.process_tree import GRACE_S
from agentrl.supervision.ray_cluster import alive_nodes, joined, shortage
from agentrl.supervision.threads import in_thread

NEWS_S = 5.0
"""How long one question for news waits on the node."""
LOST_S = 60.0
"""Silence after which a part is given up: its node, or the way to it, is gone."""
ANSWER_S = 60.0
"""Deadline for a fresh actor to answer: its worker process starts first."""
LOST = GUARD_KILLED


@asynccontextmanager
async def ray_place(settings: RayConfig) -> AsyncIterator[RayPlace]:
    """The cluster of `settings` as a place. Raises as `ray_cluster.joined` does."""
    async with joined(settings) as ray:
        yield RayPlace(ray, settings, here=ray.util.get_node_ip_address())


class RayPlace:
    """A Place on the nodes of a cluster. Made by `ray_place`. A restarted part may get another node and address.

    Example:
        async with ray_place(RayConfig()) as place:
            async with place.child("engine", command, log_path=path, needs=Needs(bundle={"GPU": 1}, port=0)) as part:
                print(part.spot.url)
    """

    def __init__(self, ray: Any, settings: RayConfig, *, here: str) -> None:
        self._ray = ray
        self._settings = settings
        self.here = here
        """The address at which parts reach this process."""
        self._reserved: dict[PartName | None, list[tuple[Any, Needs]]] = {}

    async def reserve(self, needs: Sequence[Needs]) -> None:
        """See Place. Ray puts each part on the emptiest node, so those that take most of a node go first."""

        def size(one: Needs) -> tuple[bool, float, float]:
            return one.machines > 1, one.bundle.get("GPU", 0), sum(one.bundle.values())

        asked = [await self._asked(one) for one in needs]
        for one in sorted(asked, key=size, reverse=True):
            name = str(one.part).replace("_", " ")
            group = self._group(one)
            self._reserved.setdefault(one.part, []).append((group, one))
            await self._granted(name, group, one)

    @asynccontextmanager
    async def child(
        self,
        name: str,
        command: Command,
        *,
        log_path: Path,
        needs: Needs,
        env: Mapping[str, str] | None = None,
        on_line: Callable[[str], None] | None = None,
        may_end: Callable[[], bool] = lambda: True,
        has_own_temporary: bool = False,
    ) -> AsyncIterator[Child]:
        """See Place. `env` travels as an argument of a call between processes of the cluster."""

        async def start() -> Process:
            options = {
                "python": sys.executable,
                "cwd": os.getcwd(),
                "has_own_temporary": has_own_temporary,
                "has_output": on_line is not None,
            }
            group, held = await self._taken(needs)
            hosts: list[Any] = []
            try:
                await self._granted(name, group, held)
                hosts += [self._host(group, index, held.bundle) for index in range(needs.machines)]
                spots = await _in_time(name, self._spots(hosts, needs))
                commands = [arguments_of(command, spot) for spot in spots]
                starts = (
                    host.start.remote(words, dict(env or {}), **options)
                    for host, words in zip(hosts, commands, strict=True)
                )
                await _in_time(name, _all(starts))
            except BaseException as error:
                await in_thread(partial(self._drop, hosts, group), name=f"end of {name}")
                if isinstance(error, self._ray.exceptions.RayError):
                    raise InfraError(f"the {name} process could not be started: {_cause(error)}") from error
                raise
            drop = partial(self._drop, hosts, group)
            return RayProcess(self._ray, hosts, spots[0], logs=_logs(log_path, len(hosts)), on_line=on_line, drop=drop)

        async with Child(name, log_path, start, may_end=may_end).running() as part:
            yield part

    async def _taken(self, needs: Needs) -> tuple[Any, Needs]:
        """The group that is reserved for such a part, or a new one, and what it holds."""
        if reserved := self._reserved.get(needs.part):
            return reserved.pop(0)
        asked = await self._asked(needs)
        return self._group(asked), asked

    async def _asked(self, needs: Needs) -> Needs:
        return replace(needs, bundle=await in_thread(partial(self._bundle, needs), name="resources of a part"))

    def _group(self, asked: Needs) -> Any:
        strategy = "STRICT_SPREAD" if asked.machines > 1 else "PACK"
        return self._ray.util.placement_group([asked.bundle] * asked.machines, strategy=strategy)

    def _bundle(self, needs: Needs) -> dict[str, float]:
        """What the config sets for the part, or the default, of which only CPUs and GPUs are asked for on a cluster
        that has nothing else."""
        if needs.part in self._settings.bundles:
            return self._settings.bundles[needs.part]
        known = {"CPU", "GPU"}.union(*(node.total for node in alive_nodes(self._ray)))
        return {kind: number for kind, number in needs.bundle.items() if kind in known}

    async def _granted(self, name: str, group: Any, needs: Needs) -> None:
        """Wait for the resources. Raises InfraError with a table when they are not granted in time."""
        began, within_s = asyncio.get_running_loop().time(), self._settings.grant_timeout_s
        while not await in_thread(partial(group.wait, 1), name=f"resources of {name}"):
            if asyncio.get_running_loop().time() - began > within_s:
                nodes = await in_thread(partial(alive_nodes, self._ray), name="nodes of the cluster")
                raise InfraError(
                    f"Ray had no room for the {name} within {within_s:g} s (ray.grant_timeout_s):\n"
                    f"{shortage(needs, nodes)}\nFree the resources, add nodes, or change what it asks for: "
                    "engine.tensor_parallel, learner.num_ranks, ray.ranks_per_node, ray.bundles"
                )

    def _host(self, group: Any, index: int, bundle: Mapping[str, float]) -> Any:
        """An actor on the machine of a bundle."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        return (
            self._ray.remote(PartHost)
            .options(
                num_cpus=bundle.get("CPU", 0),
                num_gpus=bundle.get("GPU", 0),
                resources={kind: number for kind, number in bundle.items() if kind not in ("CPU", "GPU")},
                max_restarts=0,
                max_concurrency=4,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    placement_group=group, placement_group_bundle_index=index
                ),
            )
            .remote()
        )

    async def _spots(self, hosts: Sequence[Any], needs: Needs) -> list[Spot]:
        addresses = await _all(host.address.remote() for host in hosts)
        wanted = 0 if needs.port is None else needs.port
        ports = await _all(
            host.free_port.remote(address, wanted) for host, address in zip(hosts, addresses, strict=True)
        )
        meeting = f"{addresses[0]}:{ports[0]}" if needs.machines > 1 else ""
        return [
            Spot(host=address, port=port, machine=index, meeting=meeting)
            for index, (address, port) in enumerate(zip(addresses, ports, strict=True))
        ]

    def _drop(self, hosts: Sequence[Any], group: Any) -> None:
        """Give the resources back. What still runs on them ends: the actors hold the input of the guards."""
        with suppress(self._ray.exceptions.RayError, RuntimeError, ValueError):
            for host in hosts:
                self._ray.kill(host)
            self._ray.util.remove_placement_group(group)


class RayProcess:
    """A Process on one node or several, which end together. Made by RayPlace.

    Args:
        hosts: the actors, one on each machine.
        spot: of the first machine.
        logs: a file for each machine.
        drop: gives the resources back.
    """

    def __init__(
        self,
        ray: Any,
        hosts: Sequence[Any],
        spot: Spot,
        *,
        logs: Sequence[Path],
        on_line: Callable[[str], None] | None,
        drop: Callable[[], None],
    ) -> None:
        self.spot = spot
        self.note = ""
        """See Process."""
        self._ray = ray
        self._hosts = hosts
        self._logs = logs
        self._on_line = on_line
        self._drop = drop
        self._is_dropped = False
        self._task = asyncio.create_task(self._code(), name=f"part at {spot.host}")

    @property
    def returncode(self) -> int | None:
        """See Process."""
        return self._task.result() if self._task.done() and not self._task.cancelled() else None

    async def wait(self) -> int:
        """See Process."""
        return await asyncio.shield(self._task)

    def end_all(self) -> None:
        """See Process."""
        for host in self._hosts:
            host.end_all.remote()

    async def stop(self) -> None:
        """See Process."""
        if self._is_dropped:
            return
        self._is_dropped = True
        ending = asyncio.create_task(self._end(), name="end of a part on Ray")
        cancelled = False
        while not ending.done():
            try:
                await asyncio.wait({ending})
            except asyncio.CancelledError:
                cancelled = True
        if cancelled:
            raise asyncio.CancelledError
        await ending

    async def _end(self) -> None:
        for host in self._hosts:
            host.stop.remote()
        await asyncio.wait({self._task}, timeout=GRACE_S + 5)
        if self.returncode in (None, GUARD_KILLED):  # no guard has said that all are gone
            with suppress(TimeoutError, self._ray.exceptions.RayError):
                async with asyncio.timeout(GRACE_S):
                    await _all(host.end_all.remote() for host in self._hosts)
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task
        await in_thread(self._drop, name="end of a part on Ray")

    async def _code(self) -> int:
        """The exit code: the first that is not 0, whereupon the others are ended, or 0 when all have ended."""
        follows = {asyncio.create_task(self._follow(index)) for index in range(len(self._hosts))}
        try:
            for ended in asyncio.as_completed(list(follows)):
                if code := await ended:
                    for host in self._hosts:
                        host.stop.remote()
                    await asyncio.wait(follows, timeout=GRACE_S + 5)
                    return code
            return 0
        finally:
            for follow in follows:
                follow.cancel()
            await asyncio.gather(*follows, return_exceptions=True)

    async def _follow(self, index: int) -> int:
        """Copy the log of one machine until its end. Returns the exit code, LOST when the machine is gone."""
        host, position, line = self._hosts[index], [0, 0], b""
        while True:
            try:
                async with asyncio.timeout(LOST_S):
                    news, output, code = await host.news.remote(*position, within_s=NEWS_S)
            except (TimeoutError, self._ray.exceptions.RayError) as error:
                reason = _cause(error) or f"no answer for {LOST_S:g} s"
                self.note = f"its node went away, or Ray's worker there was killed ({reason})"
                return LOST
            position = [position[0] + len(news), position[1] + len(output)]
            with self._logs[index].open("ab") as file:
                file.write(news)
            *lines, line = (line + output).split(b"\n")
            for complete in lines if self._on_line else ():
                self._on_line(complete.decode(errors="replace"))  # type: ignore[misc]
            if code is not None:
                return int(code)


def _logs(first: Path, number: int) -> list[Path]:
    """learner.log, learner-1.log, ..."""
    return [first, *(first.with_stem(f"{first.stem}-{index}") for index in range(1, number))]


async def _all(refs: Any) -> list[Any]:
    return list(await asyncio.gather(*refs))


async def _in_time(name: str, work: Coroutine[Any, Any, list[Any]]) -> list[Any]:
    try:
        async with asyncio.timeout(ANSWER_S):
            return await work
    except TimeoutError as error:
        raise InfraError(
            f"the {name} process could not be started: no answer from its node in {ANSWER_S:g} s"
        ) from error
    except CannotStart as error:
        raise InfraError(f"the {name} process could not be started: {_cause(error)}") from error


def _cause(error: BaseException) -> str:
    """One line of an error that Ray brought from another process."""
    text = str(getattr(error, "cause", None) or error).strip()
    return text.splitlines()[-1] if text else ""
