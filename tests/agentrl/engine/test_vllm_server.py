"""The engine's start: until it answers, or with the cause from its log."""

from pathlib import Path

import pytest

from agentrl.config import EngineConfig
from agentrl.engine import vllm_command, vllm_server
from agentrl.errors import EngineError
from agentrl.supervision.child import child
from agentrl.supervision.serving import free_port


async def test_a_server_that_ends_is_reported_with_its_log() -> None:
    with pytest.raises(EngineError, match=r"exit code 3 .*\n.*no such model"):
        await vllm_server.wait_ready("http://127.0.0.1:9", poll=lambda: 3, log=lambda: "no such model", timeout_s=5)


async def test_a_server_that_never_answers_is_given_up_with_its_log() -> None:
    with pytest.raises(EngineError, match=r"within 0.3 s; raise engine.start_timeout_s(.|\n)*still loading"):
        await vllm_server.wait_ready(
            "http://127.0.0.1:9", poll=lambda: None, log=lambda: "still loading", timeout_s=0.3
        )


@pytest.mark.engine
async def test_a_missing_model_gives_the_reason_of_the_real_server(tmp_path: Path) -> None:
    port = free_port()
    argv, env = vllm_command.command(
        model_path=str(tmp_path / "nothing-here"),
        served_name="policy",
        host="127.0.0.1",
        port=port,
        config=EngineConfig(),
        max_context=640,
        dtype="float32",
        seed=3,
    )
    async with child("engine", argv, log_path=tmp_path / "engine.log", env=env, has_own_temporary=True) as part:
        with pytest.raises(EngineError, match=r"exit code 1 (.|\n)*nothing-here"):
            await vllm_server.wait_ready(f"http://127.0.0.1:{port}", poll=part.poll, log=part.log_tail, timeout_s=150)


@pytest.mark.parametrize(
    ("line", "fix"),
    [
        ("RuntimeError: Failed to find C compiler. Please specify via CC", "misses a C compiler or Python's headers"),
        ("main.c:5:10: fatal error: Python.h: No such file or directory", "misses a C compiler or Python's headers"),
        ("ImportError: libcuda.so.1: cannot open shared object file", "driver is missing or older"),
        (
            "RuntimeError: The NVIDIA driver on your system is too old (found version 12040)",
            "driver is missing or older",
        ),
    ],
)
async def test_what_the_machine_misses_is_told_with_the_command_that_names_it(line: str, fix: str) -> None:
    with pytest.raises(EngineError, match=rf"{fix}.*agentrl doctor"):
        await vllm_server.wait_ready("http://127.0.0.1:9", poll=lambda: 1, log=lambda: line, timeout_s=5)


async def test_what_vllm_says_of_its_settings_is_no_cause() -> None:
    settings = "non-default args: {'max_model_len': 1024, 'max_num_seqs': 64}\nUsing max model len 1024\n"
    with pytest.raises(EngineError) as caught:
        await vllm_server.wait_ready("http://127.0.0.1:9", poll=lambda: None, log=lambda: settings, timeout_s=0.3)
    assert "It seems" not in str(caught.value)
