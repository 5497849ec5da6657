"""The engine's tests once more with what a GPU gets and a CPU does not: a scheduler that makes the next batch before it
has the tokens of the last, and Model Runner V2, whose Triton kernels are interpreted here.

Versions, recomputed and stale KV entries, and the return to the previous weights must stay exact.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.agentrl.engine import gpu_scheduling
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
from tests.device import cpu_engine_only

pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow,
    cpu_engine_only("a GPU has both by itself, in test_vllm_engine.py"),
]


@pytest.fixture
def long_answer() -> int:
    """Interpreted kernels are slow: there is time for two updates all the same."""
    return 160


@pytest.fixture(scope="module")
def vllm_server(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VLLMServer]:
    """The server of tests/conftest.py, as it runs on a GPU."""
    folder = tmp_path_factory.mktemp("scheduling")
    with serving_tiny_model(tiny_model_dir, folder, **gpu_scheduling.environment(folder / "site")) as server:
        log = server.log_path.read_text()
        assert gpu_scheduling.ASYNC_MARK in log and gpu_scheduling.V2_MARK in log
        yield server
