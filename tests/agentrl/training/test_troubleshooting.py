"""Each message in docs/troubleshooting.md is one that the code raises, and a test provokes it."""

from __future__ import annotations

import ast
import asyncio
import errno
import os
import re
import signal
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from agentrl.env.canary import Canaries
from agentrl.errors import ConfigError, InfraError, SandboxError
from agentrl.report.metrics import read
from agentrl.supervision import child as supervise
from agentrl.supervision.child import Spot, child
from agentrl.supervision.serving import free_port
from agentrl.tokens.tokenizer import TurnTokenizer
from agentrl.training import launch, learner_api
from agentrl.training.model_folder import check_model
from sandbox.client import SandboxClient
from tests.agentrl.training.troubles import Trouble, fragments, headings
from tests.agentrl.training.whole_run import SayYes, YesAndNo, make_config, orchestrating

ROOT = Path(__file__).parents[3]
NO_MODEL = Trouble("model.path: ... is neither a folder with a config.json nor a model on the hub that can be reached.")
LEARNER_TOKEN = Trouble("wrong or missing token: learner and orchestrator need the same AGENTRL_TOKEN")
SANDBOX_TOKEN = Trouble("the sandbox service at ... refused the token")
SANDBOX_SILENT = Trouble("the sandbox did not answer within ... s.")
LEARNER_AGAIN = Trouble("the learner was restarted: the run continues from the journal")

PROVOKED_ELSEWHERE = {
    "... can be reached by others": "supervision/test_secrets.py::test_an_engine_that_others_reach_demands_a_token",
    "... is being trained by process": "training/test_resume.py::test_two_processes_do_not_train_one_run",
    "there is no run": "test_run_folder.py::test_a_name_is_looked_up_and_one_that_is_none_gets_the_similar_ones",
    "... has exported no weights yet": "api/test_playing.py::"
    "test_a_model_can_be_the_name_of_a_run_and_is_then_what_the_run_exported",
    "--model ...: the config's engine.url": "api/test_playing.py::"
    "test_a_folder_beside_a_server_that_serves_its_own_model_is_refused",
    "... was lost: ...": "workers/test_worker_processes.py::test_code_that_blocks_stops_its_worker_alone_and_is_named",
    "no rollout worker for": "workers/test_dispatcher.py::test_a_run_without_workers_ends_with_what_to_do",
    "wrong or missing token: rollout": "workers/test_api.py::"
    "test_calls_without_the_token_or_with_a_wrong_body_are_refused",
    "the ... of the run is at": "workers/test_worker.py::"
    "test_parts_on_the_loopback_of_another_machine_are_named_with_their_setting",
    "the last ... groups each had": "training/test_orchestrator.py::test_a_task_without_signal_ends_with_a_reason",
    "... while step ... waited for groups": "training/test_orchestrator.py::"
    "test_the_minutes_hold_while_a_step_waits_and_after_a_resume",
    "the engine ended with exit code": "engine/test_vllm_server.py::test_a_server_that_ends_is_reported_with_its_log",
    "weights of version ...; it has a part": "engine/test_weight_updates.py::"
    "test_a_streamed_update_that_broke_off_is_never_resumed_and_a_complete_one_ends_the_wait",
    "...; the update before it broke off too": "engine/test_weight_updates.py::"
    "test_a_server_that_is_not_ours_has_to_be_restarted_by_its_owner",
    "update_order=rolling": "engine/test_launch_servers.py::"
    "test_settings_that_cannot_work_are_refused_with_how_to_fix_them",
    "model.path=...: ... is cut off": "engine/test_model_files.py::test_what_is_not_whole_is_named",
    "task ...: its prompt has": "rollouts/test_long_prompts.py::test_the_longest_prompt_is_measured_whole_and_named",
    "model.path=... is quantised": "training/test_model_folder.py::test_a_quantised_checkpoint_is_refused_by_name",
    "model.path=... is a mixture": "training/test_model_folder.py::test_a_run_refuses_before_anything_starts",
    "one logprob of the probe text": "engine/test_parity.py::"
    "test_an_update_with_one_outlier_is_taken_and_logged_and_one_that_is_off_is_refused",
    "step ...: mean importance weight": "../trainer/test_diagnostics.py::test_the_mean_weight_alarms_outside_its_range",
    "model.reference=... has another": "../trainer/test_reference.py::"
    "test_a_teacher_of_another_vocabulary_is_refused_by_name",
    "model.reference=... does nothing": "../trainer/test_reference.py::"
    "test_a_config_without_the_model_that_its_objective_needs_is_refused_and_so_is_an_unused_one",
    "algorithm.objective=... needs a frozen": "../trainer/test_reference.py::"
    "test_a_config_without_the_model_that_its_objective_needs_is_refused_and_so_is_an_unused_one",
    "rho_base is ...": "../trainer/objective/test_vcpo.py::test_rho_base_is_told_once_it_is_settled",
    "no engine is left": "engine/test_pool.py::test_an_update_that_no_engine_takes_is_an_error",
    "the run needs": "engine/test_placement.py::test_what_cannot_work_is_refused_with_what_would",
    "engine.gpus=... counts": "engine/test_placement.py::test_what_cannot_work_is_refused_with_what_would",
    "engine.weight_transfer=... joins": "engine/test_placement.py::test_what_cannot_work_is_refused_with_what_would",
    "learner.hostfile: DeepSpeed's": "engine/test_placement.py::test_the_first_of_two_nodes",
    "... is a CUDA build": "engine/test_vllm_command.py::"
    "test_a_cuda_build_behind_an_empty_mask_is_not_started_with_a_cpu_s_flags",
    "the learner did not deliver": "training/test_stalls.py::"
    "test_a_learner_that_never_comes_is_ended_by_its_own_deadline",
    "the ... process ended with exit code ...; its node": "supervision/test_ray_place.py::"
    "test_a_part_whose_node_goes_away_comes_back_on_another",
    "Ray had no room": "supervision/test_ray_place.py::test_more_than_there_is_ends_in_a_table",
    "the Ray cluster at": "supervision/test_ray_place.py::"
    "test_a_cluster_that_requires_no_token_is_refused_unless_allowed",
    "nothing moved for": "training/test_stalls.py::"
    "test_an_engine_that_falls_silent_in_training_is_named_down_the_whole_chain",
    "no thread of this process": "supervision/test_watchdog.py::test_code_that_lets_no_thread_run_is_interrupted_too",
    "...; the run was cancelled": "supervision/test_watchdog.py::"
    "test_a_loop_that_cannot_be_interrupted_ends_the_process",
    "the event loop stood": "supervision/test_watchdog.py::"
    "test_a_blocked_loop_is_interrupted_and_the_code_that_blocks_it_is_named",
}
FOREIGN = re.compile(
    r"\b(401|500|POST|writing the run's|LearnerError|ValueError|OperationalError: database or disk is full)\b|"
    + "|".join(map(os.strerror, (errno.ENOSPC, errno.EADDRINUSE)))
)
"""Words in the headings that are filled in, or said by the system or a library."""


def texts(node: ast.AST) -> Iterator[str]:
    """Every string below, with `...` where something is filled in."""
    for part in ast.walk(node):
        if isinstance(part, ast.JoinedStr):
            yield "".join(str(v.value) if isinstance(v, ast.Constant) else "..." for v in part.values)
        elif isinstance(part, ast.Constant) and isinstance(part.value, str):
            yield re.sub(r"%[.\d]*[a-z]", "...", part.value)


@pytest.fixture(scope="module")
def said_by_the_code() -> list[str]:
    packages = ("agentrl", "trainer", "sandbox")
    paths = [path for package in packages for path in (ROOT / package).rglob("*.py")]
    return [" ".join(text.split()) for path in paths for text in texts(ast.parse(path.read_text()))]


def test_every_message_of_the_page_is_the_codes(said_by_the_code: list[str]) -> None:
    assert len(headings()) > 30
    parts = [(heading, part.strip(":; ")) for heading in headings() for part in fragments(FOREIGN.sub("...", heading))]
    unknown = [
        f"{part!r} of {heading}" for heading, part in parts if not any(part in text for text in said_by_the_code)
    ]
    assert not unknown, "\n".join(unknown)


def test_every_message_of_the_page_is_provoked_by_a_test() -> None:
    promised = set()
    for text in (path.read_text() for path in (ROOT / "tests").rglob("*.py")):
        for node in ast.walk(ast.parse(text)) if "Trouble(" in text else ():
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "Trouble":
                promised.add(ast.literal_eval(node.args[0]))
    assert promised <= set(headings())
    for heading in set(headings()) - promised:
        tests = [test for beginning, test in PROVOKED_ELSEWHERE.items() if heading.startswith(beginning)]
        assert tests, heading
        file, name = tests[0].split("::")
        assert f"def {name}(" in (ROOT / "tests/agentrl" / file).read_text()


def test_a_model_that_is_not_there_is_named_with_its_setting(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    config = config.model_copy(update={"model": config.model.model_copy(update={"path": str(tmp_path / "model")})})
    with pytest.raises(ConfigError) as found:
        check_model(config)
    assert NO_MODEL.is_in(found.value)


async def test_a_learner_with_another_token_is_told(tmp_path: Path, tokenizer: TurnTokenizer) -> None:
    async with (
        orchestrating(make_config(tmp_path), YesAndNo(tokenizer), tokenizer) as (_, url),
        httpx.AsyncClient(base_url=url) as http,
    ):
        reply = await http.post(learner_api.STEP, headers={"Authorization": "Bearer another"})
    assert reply.status_code == 401 and LEARNER_TOKEN.is_in(reply.text)


async def test_a_sandbox_with_another_token_ends_the_run_before_it_begins(tmp_path: Path) -> None:
    async with (
        launch.sandbox_service(make_config(tmp_path), logs=tmp_path, token="right") as (client, parts),
        SandboxClient(client.url, token="wrong") as stranger,
    ):
        await launch.sandbox_ready(stranger, parts, max_restarts=0)
        with pytest.raises(InfraError) as found:
            await Canaries(SayYes, make_env=SayYes, sandbox=stranger).check(when="at the start")
    assert SANDBOX_TOKEN.is_in(found.value)


async def test_a_sandbox_that_never_comes_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "SANDBOX_START_TIMEOUT_S", 0.2)
    async with SandboxClient(f"http://127.0.0.1:{free_port()}") as nobody:
        with pytest.raises(SandboxError) as found:
            await launch.sandbox_ready(nobody, [], max_restarts=3)
    assert SANDBOX_SILENT.is_in(found.value)


LEARNER = """
import asyncio, sys
from tests.agentrl.training.whole_run import obedient_learner
asyncio.run(obedient_learner(sys.argv[1], [], name=sys.argv[2]))
"""


async def test_a_learner_that_is_killed_is_started_again_and_the_run_goes_on(
    tmp_path: Path, tokenizer: TurnTokenizer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(supervise, "RESTART_AFTER_S", 0.01)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    config = make_config(tmp_path, steps=60, eval_every=0)
    metrics = tmp_path / "t" / "metrics.jsonl"
    async with orchestrating(config, YesAndNo(tokenizer), tokenizer) as (orchestrator, url):

        def command(spot: Spot) -> list[str]:
            return [sys.executable, "-c", LEARNER, url, uuid.uuid4().hex]

        async with child("learner", command, log_path=tmp_path / "log") as part, launch.watching(part):
            part.allow_restarts(3)
            run = asyncio.create_task(orchestrator.run())
            while not any(line.kind == "step" and line.step == 3 for line in read(metrics)):
                await asyncio.sleep(0.05)
            assert part.process.pid
            os.killpg(
                int(Path(f"/proc/{part.process.pid}/task/{part.process.pid}/children").read_text()), signal.SIGKILL
            )
            await run
        assert part.num_starts == 2
    assert LEARNER_AGAIN.is_in(caplog.text)
    steps = [line.step for line in read(metrics) if line.kind == "step"]
    assert steps == list(range(1, 61))
