"""Each careless input ends with code 2 and one screen: what is wrong, and what to write. Nothing is started."""

from pathlib import Path

import pytest

from tests.agentrl.cli.careless_inputs import LINES, Careless, flat, run_careless
from tests.agentrl.cli.careless_table import CASES


@pytest.mark.parametrize("case", CASES, ids=[case.typed for case in CASES])
def test_a_careless_input_is_answered_on_one_screen(case: Careless, tmp_path: Path) -> None:
    said = run_careless(case, tmp_path)
    assert said.code == case.code, said.text
    assert not [words for words in case.says if words not in flat(said.text)], said.text
    assert "Traceback" not in said.text and "internal error" not in said.text
    assert len(said.text.splitlines()) <= LINES
    assert not list(tmp_path.glob("runs/*/logs/*"))
