"""The file that `learner.hostfile` names: the machines of the learner's ranks. Independent of how ranks are started."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from agentrl.errors import ConfigError

_LINE = re.compile(r"(\S+)\s+slots=(\d+)\s*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """One line of the hostfile. Example: `node-1 slots=8` is `Host(name="node-1", num_ranks=8)`."""

    name: str
    num_ranks: int


def read_hostfile(path: str | Path) -> list[Host]:
    """The lines `name slots=ranks`; empty lines and comments (#) are skipped. Raises ConfigError."""
    try:
        lines = Path(path).read_text().splitlines()
    except OSError as error:
        raise ConfigError(f"learner.hostfile: cannot read {path}: {error.strerror}") from error
    hosts: dict[str, Host] = {}
    for number, line in enumerate((line.strip() for line in lines), start=1):
        if not line or line.startswith("#"):
            continue
        if not (match := _LINE.fullmatch(line)) or (name := match[1]) in hosts or not (num_ranks := int(match[2])):
            raise ConfigError(
                f"learner.hostfile: {path}:{number}: {line!r}: write each machine once, as `name slots=8`, with at "
                "least one slot"
            )
        hosts[name] = Host(name=name, num_ranks=num_ranks)
    if not hosts:
        raise ConfigError(f"learner.hostfile: {path} names no machine: write lines such as `node-1 slots=8`")
    return list(hosts.values())
