"""What a worker refuses before it plays."""

from __future__ import annotations

import pytest

from agentrl.errors import ConfigError
from agentrl.supervision.secrets import Secrets
from agentrl.workers.worker import SandboxAddress, joined_sandbox

SECRETS = Secrets(run="run", sandbox="box", engine=None)
LOOPBACK = "http://127.0.0.1:8321"


def test_parts_on_the_loopback_of_another_machine_are_named_with_their_setting() -> None:
    with pytest.raises(ConfigError, match=r"the sandbox of the run is at http://127\.0\.0\.1:8321.*set sandbox\.url"):
        SandboxAddress(LOOPBACK, "http://192.0.2.1:8401")
    elsewhere = SandboxAddress("http://192.0.2.5:8321", "http://192.0.2.1:8401")
    with pytest.raises(ConfigError, match=r"set sandbox\.url"):
        elsewhere.follow(LOOPBACK)


async def test_the_client_of_the_sandbox_follows_it_to_another_address() -> None:
    address = SandboxAddress(LOOPBACK, "http://127.0.0.1:8401")
    async with joined_sandbox(address, SECRETS) as sandbox:
        assert sandbox.url == LOOPBACK
        address.follow("http://127.0.0.1:8322")
        assert sandbox.url == "http://127.0.0.1:8322"
