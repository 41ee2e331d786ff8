"""The examples of actors do what their first lines promise, in seconds; one of them kills a rank on the way."""

import re
import sys

import pytest
from console import REPOSITORY, Console

EXAMPLES = ("survive_a_kill.py", "parameter_server.py", "service.py")


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_shows_what_it_promises(console: Console, name: str) -> None:
    script = REPOSITORY / "examples" / name
    promised = re.search(r'Expect "(.+)"', script.read_text())
    assert promised is not None
    ended = console.run([sys.executable, str(script)])
    assert ended.code == 0, ended.text
    assert promised[1] in ended.text
