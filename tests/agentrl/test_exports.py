"""What `from agentrl import ...` gives."""

import subprocess
import sys

import pytest

import agentrl


@pytest.mark.parametrize("name", agentrl.__all__)
def test_every_exported_name_is_there_and_is_no_module(name: str) -> None:
    assert callable(getattr(agentrl, name))


def test_the_lists_agree() -> None:
    assert sorted(agentrl._MODULES) == sorted(agentrl.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'mkae'"):
        _ = agentrl.mkae  # type: ignore[attr-defined]


def test_importing_the_package_loads_nothing() -> None:
    code = "import sys, agentrl; assert not {'pydantic', 'agentrl.env'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
