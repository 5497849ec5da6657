"""What /proc tells a session about the machine around it, and what it could change there about itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from sandbox.client import SandboxSession
from tests.sandbox.conftest import Service, descendants
from tests.sandbox.tiers import Tier

READ = "print(open('/proc/{who}/{name}').read())"
WHO = ("self", "1", "thread-self")


@pytest.mark.parametrize("who", WHO)
async def test_a_session_is_at_the_root_of_its_control_groups(
    isolated: Tier, session: SandboxSession, who: str
) -> None:
    result = await session.exec(READ.format(who=who, name="cgroup"))
    if isolated.num_visible_pids is None:
        assert result.status == "error"
        return
    assert result.stdout.strip()
    assert {line.rpartition(":")[2] for line in result.stdout.split()} == {"/"}


@pytest.mark.parametrize("name", ["mountinfo", "mounts", "mountstats"])
@pytest.mark.parametrize("who", WHO)
async def test_the_hosts_mounts_cannot_be_read(isolated: Tier, session: SandboxSession, who: str, name: str) -> None:
    if isolated.backend == "docker":
        pytest.skip("the engine's own mounts, which docs/sandbox.md names")
    assert (await session.exec(READ.format(who=who, name=name))).stdout.strip() == ""


async def test_a_session_ends_first_when_memory_is_short(
    isolated: Tier, service: Service, session: SandboxSession
) -> None:
    assert (await session.exec("1")).result == "1"
    if not isolated.processes_are_ours:
        assert (await session.exec(READ.format(who="self", name="oom_score_adj"))).stdout.strip() == "1000"
        return
    scores = {pid: _score(pid) for pid in descendants(service.process.pid)}
    assert 1000 in scores.values()
    assert _score(service.process.pid) == _score("self")
    assert _score(service.process.pid) in scores.values()  # the zygote's


def _score(pid: int | str) -> int | None:
    try:
        return int(Path(f"/proc/{pid}/oom_score_adj").read_text())
    except OSError:
        return None  # it ended meanwhile


WRITES = {"oom_score_adj": "0", "coredump_filter": "0x7f", "clear_refs": "1", "timerslack_ns": "1", "comm": "x"}


@pytest.mark.parametrize("name", WRITES)
async def test_a_session_changes_nothing_about_itself_in_proc(
    isolated: Tier, session: SandboxSession, name: str
) -> None:
    if isolated.backend == "docker":
        pytest.skip("in a container /proc is its own to change")
    code = f"open('/proc/self/{name}', 'w').write({WRITES[name]!r})"
    assert (await session.exec(code)).status == "error"
    if isolated.num_visible_pids is not None:
        assert (await session.exec("open('/proc/self/mem', 'r+b', buffering=0)")).status == "error"


async def test_what_programs_use_below_proc_works(isolated: Tier, session: SandboxSession) -> None:
    if isolated.num_visible_pids is None:
        pytest.skip("/proc is closed")
    code = (
        "import os\nwith open(f'/proc/self/fd/{os.open(\"f\", os.O_CREAT | os.O_RDWR)}', 'w') as file: file.write('x')\n"
        "assert os.path.samefile('/proc/self/cwd', '.') and os.listdir('/proc/self/task')\nopen('f').read()"
    )
    assert (await session.exec(code)).result == "'x'"
