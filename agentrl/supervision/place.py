"""Where the parts of a run are started: on this machine, or on the nodes of a Ray cluster (ray_place.py).

A part is a command; a place gives it a machine, an address, a port and GPUs, and reports its log and its exit code as
those of a process here. Independent of what the parts do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from agentrl.config.ray import PartName
from agentrl.supervision.child import Child, Command, Spot, child
from agentrl.supervision.serving import configured_port


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What one start of a part needs. Example: `Needs(bundle={"GPU": 2.0, "CPU": 1.0}, port=0)`."""

    bundle: dict[str, float] = field(default_factory=lambda: {"CPU": 1.0})
    """Ray resources, on each of its machines; this machine gives all that it has."""
    part: PartName | None = None
    """The entry of `ray.bundles` that replaces `bundle`."""
    machines: int = 1
    host: str = "127.0.0.1"
    """The address that it listens on, on this machine. Elsewhere it is the node's."""
    port: int | None = None
    """The port that it listens on, 0 for any free one; None where it does not listen."""
    port_key: str = "port"
    """The setting that chose the port, for the message when it is taken."""


class Place(Protocol):
    """Starts the parts of a run. Example: `LocalPlace()`."""

    @property
    def here(self) -> str:
        """The address at which parts reach this process."""
        ...

    async def reserve(self, needs: Sequence[Needs]) -> None:
        """Hold what parts need that will be started, so that small ones leave room for large ones.

        Raises InfraError where there is no room.
        """
        ...

    def child(
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
    ) -> AbstractAsyncContextManager[Child]:
        """Run `command` for the length of the block. See `child` for the arguments, and `Needs`.

        `command` is called with the Spot of each start, on the first of the machines and on the others. Raises
        ConfigError when the port is taken, InfraError when the part could not be started.
        """
        ...


class LocalPlace:
    """This machine. A part keeps its address when it is restarted.

    Example:
        async with LocalPlace().child("engine", command, log_path=path, needs=Needs(port=0)) as part:
            print(part.spot.url)
    """

    here = "127.0.0.1"

    async def reserve(self, needs: Sequence[Needs]) -> None:
        """See Place. This machine gives each part all that it has."""

    def child(
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
    ) -> AbstractAsyncContextManager[Child]:
        """See Place."""
        port = 0 if needs.port is None else configured_port(needs.host, needs.port, key=needs.port_key)
        return child(
            name,
            command,
            log_path=log_path,
            env=env,
            on_line=on_line,
            may_end=may_end,
            has_own_temporary=has_own_temporary,
            spot=Spot(host=needs.host, port=port),
        )
