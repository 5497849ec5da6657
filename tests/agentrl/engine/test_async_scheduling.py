"""The engine's tests once more on a server that schedules the next batch before it has the tokens of the last, as vLLM
does on GPUs: versions, recomputed and stale KV entries, and the return to the previous weights stay exact."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.agentrl.engine import async_plugin
from tests.agentrl.engine.test_vllm_engine import (  # noqa: F401 - run again, with the server of this file
    engine,
    stale_engine,
    test_a_stop_token_ends_the_turn_and_is_kept,
    test_abort_ends_the_named_requests_alone_and_keeps_what_was_written,
    test_cancelling_a_call_aborts_its_request,
    test_logprobs_are_those_of_transformers,
    test_other_weights_on_disk_than_the_learners_are_a_sync_error,
    test_running_requests_go_on_and_every_token_names_its_weights,
    test_score_is_the_models_own,
    test_stale_keeps_running_requests_on_their_old_kv,
    test_stale_kv_never_serves_a_request_of_the_next_version,
    test_weights_that_cannot_be_loaded_leave_the_ones_before_in_place,
)
from tests.conftest import VLLMServer, serving_tiny_model

pytestmark = [pytest.mark.engine, pytest.mark.slow]

ENTRY_POINTS = f"[vllm.general_plugins]\nforce_async = {async_plugin.__name__}:register\n"


@pytest.fixture(scope="module")
def vllm_server(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VLLMServer]:
    """The server of tests/conftest.py with the plugin."""
    folder = tmp_path_factory.mktemp("async")
    installed = folder / "plugins" / "force_async-0.dist-info"
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: force-async\nVersion: 0\n")
    (installed / "entry_points.txt").write_text(ENTRY_POINTS)
    paths = [str(installed.parent), str(Path(__file__).parents[3]), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    with serving_tiny_model(tiny_model_dir, folder, PYTHONPATH=os.pathsep.join(filter(None, paths))) as server:
        yield server


def test_the_scheduler_is_the_asynchronous_one(vllm_server: VLLMServer) -> None:
    assert f"{async_plugin.MARK} 2" in vllm_server.log_path.read_text()
