"""Code that parsers fail on, and code that breaks the interpreter that runs it."""

from __future__ import annotations

import pytest

from sandbox.client import SandboxSession
from tests.sandbox.attacks.conftest import Healthy
from tests.sandbox.tiers import Tier

TIERS_TO_TRY = ("namespaces", "docker", "landlock", "unsafe")

INPUTS = {
    "empty": ("", "ok"),
    "blank": (" \n\n", "ok"),
    "comment": ("# nothing", "ok"),
    "nul": ("1\0", "error"),
    "bom": ("\ufeff1 + 1", "ok"),
    "surrogate": ("'\ud800'", "error"),
    "syntax": ("def f(:", "error"),
    "input": ("input()", "error"),
    "exit": ("exit()", "ok"),
    "exit_code": ("import sys; sys.exit(3)", "error"),
    "quit_text": ("raise SystemExit('bye')", "error"),
    "big": ("x = '" + "x" * 10_000_000 + "'", "ok"),
    "crlf": ("x = 1\r\nx", "ok"),
    "form_feed": ("\f1", "ok"),
    "tabs": ("if 1:\n\tx = 1\n        y = 1", "error"),
    "stdin_read": ("import sys; sys.stdin.read()", "ok"),
    "await": ("await x", "error"),
    "future": ("from __future__ import annotations\nx: y = 1", "ok"),
    "coding": ("# -*- coding: utf-7 -*-\n1", "ok"),
    "main": ("if __name__ == '__main__': x = 1", "ok"),
    "pickle_self": ("import pickle\ndef f(): pass\nlen(pickle.dumps(f)) > 0", "ok"),
    "many_lines": ("x = 1\n" * 50_000, "ok"),
    "deep_nesting": ("if 1:\n" + "".join(" " * n + "if 1:\n" for n in range(1, 99)) + " " * 99 + "x = 1", "ok"),
    "too_deep": ("-" * 100_000 + "1", "error"),
    "broken_stdout": ("import sys; sys.stdout.close(); sys.stdout = None", "ok"),
    "broken_builtins": ("import builtins; del builtins.print, builtins.repr, builtins.len, builtins.str", "crashed"),
}


@pytest.mark.parametrize("name", INPUTS)
async def test_any_input_is_answered(session: SandboxSession, healthy: Healthy, name: str) -> None:
    code, status = INPUTS[name]
    result = await session.exec(code, timeout_s=10)
    assert result.status == status or (name == "too_deep" and result.status == "crashed")  # the parser's own limits
    await healthy()


async def test_stdin_is_given(session: SandboxSession) -> None:
    assert (await session.exec("input() + input()", stdin="a\nb\n")).result == "'ab'"


BREAKERS = {
    "json": "import json\njson.loads = json.dumps = None",
    "os_write": "import os\nos.write = lambda *a: 0",
    "os_getpid": "import os\nos.getpid = lambda: 7",
    "worker": "import sys\nsys.modules['sandbox.worker'].Worker.serve = None\nsys.modules['sandbox.worker']._cut = None",
    "modules": "import sys\nsys.modules.clear()",
    "builtins": "import builtins\nbuiltins.__dict__.clear()",
    "import": "import builtins\nbuiltins.__import__ = None",
    "excepthook": "import sys\nsys.excepthook = sys.unraisablehook = None",
    "linecache": "import linecache\nlinecache.cache = None",
    "signal": "import signal\nsignal.signal = None",
    "main_module": "import sys\ndel sys.modules['__main__']",
    "recursion": "import sys\nsys.setrecursionlimit(50)",
    "close_control": "import os\nos.close(3)",
    "swap_control": "import os, socket\na, b = socket.socketpair()\nos.dup2(a.fileno(), 3)",
    "chdir": "import os\nos.mkdir('d'); os.chdir('d'); os.rmdir('../d')",
    "umask": "import os\nos.umask(0o777)",
    "limits": "import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (4, 4))",
    "no_cpu": "import resource\nresource.setrlimit(resource.RLIMIT_CPU, (1, 1))\nwhile True: pass",
    "interrupt_storm": "import signal, os\nfor _ in range(50): os.kill(os.getpid(), signal.SIGUSR1)",
}


@pytest.mark.parametrize("name", BREAKERS)
async def test_who_breaks_the_interpreter_breaks_only_his_own(
    session: SandboxSession, healthy: Healthy, name: str
) -> None:
    await session.exec(BREAKERS[name], timeout_s=2)
    second = await session.exec("6 * 7", timeout_s=2)
    assert second.status in {"ok", "error", "crashed", "timeout"}
    await healthy()


async def test_raised_limits_stay_down(isolated: Tier, session: SandboxSession) -> None:
    code = (
        "import resource as r\nraised = []\n"
        "for name in ('RLIMIT_AS', 'RLIMIT_NPROC', 'RLIMIT_FSIZE', 'RLIMIT_NOFILE', 'RLIMIT_CORE', 'RLIMIT_MEMLOCK'):\n"
        "  soft, hard = r.getrlimit(getattr(r, name))\n"
        "  try: r.setrlimit(getattr(r, name), (hard + 1, hard + 1)); raised.append(name)\n"
        "  except (ValueError, OSError): pass\nraised"
    )
    assert (await session.exec(code)).result == "[]"
