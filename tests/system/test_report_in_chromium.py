"""The report in a real browser: running, failed, one rank, a thousand ranks, light and dark."""

import re
import shutil
import struct
import subprocess
import zlib
from pathlib import Path
from typing import Any

import pytest
from console import Console, until
from recordings import Recording, write_run

from argosy.insight import OpenedRun

pytestmark = pytest.mark.system
SCRIPT = """
import sys, time, torch
torch.manual_seed(0)
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(int(sys.argv[1])):
    model(torch.randn(8, 64)).square().mean().backward()
    optimizer.step()
    time.sleep(0.02)
    if "fail" in sys.argv and step == 60:
        raise SystemExit(3)
"""


@pytest.fixture
def browser() -> str:
    path = shutil.which("chromium")
    assert path, "chromium is missing: tools/packages.sh tests/system/packages.txt"
    return path


def look(browser: str, page: Path, *, dark: bool = False) -> tuple[str, bytes]:
    """Render a page; returns the document as the browser has it, and the picture. Nothing may be said or asked for."""
    picture, log = page.with_suffix(".png"), page.with_suffix(".netlog")
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--enable-logging=stderr"]
    command += [f"--blink-settings=preferredColorScheme={0 if dark else 1}", "--window-size=1100,2000"]
    # The browser has errands of its own: they reach nobody, and are told apart by who began them.
    command += ["--host-resolver-rules=MAP * ~NOTFOUND", f"--log-net-log={log}"]
    command += [f"--user-data-dir={page.with_suffix('.profile')}"]
    said = subprocess.run([*command, f"--screenshot={picture}", f"file://{page}"], capture_output=True, timeout=240)
    assert not requests_of_pages(log.read_text(errors="replace"))
    dumped = subprocess.run([*command, "--dump-dom", f"file://{page}"], capture_output=True, timeout=240)
    assert "CONSOLE" not in said.stderr.decode() + dumped.stderr.decode()
    return dumped.stdout.decode(), picture.read_bytes()


def requests_of_pages(log: str) -> list[str]:
    """The requests over a network that a page began, not the browser."""
    begun = [line for line in log.splitlines() if '"initiator":' in line and '"not an origin"' not in line]
    return [line for line in begun if re.search(r'"url":"(https?|wss?):', line)]


def corner(picture: bytes) -> int:
    """How bright the corner of a PNG is: 255 is white."""
    at, data = 8, b""
    while at < len(picture):
        (length,) = struct.unpack_from(">I", picture, at)
        if picture[at + 4 : at + 8] == b"IDAT":
            data += picture[at + 8 : at + 8 + length]
        at += 12 + length
    return zlib.decompress(data)[1]  # After the filter of the row: its first byte is the corner's red.


def numbers_are_those_of_sql(run: OpenedRun, document: str) -> None:
    rows: list[tuple[Any, ...]] = run.sql("SELECT rank, class, seconds FROM ledger WHERE launch = 1").rows
    cells = set(re.findall(r"<td>([\d.]+)</td>", document))
    shown = [row for row in rows if f"<td>rank {row[0]}</td>" in document]
    assert shown
    assert {f"{seconds:.3f}" for _, _, seconds in shown} <= cells


def test_failed_and_running_runs(console: Console, browser: str, tmp_path: Path) -> None:
    (console.cwd / "train.py").write_text(SCRIPT)
    assert console.argosy("run", "-n", "2", "--name", "failed", "train.py", "100", "fail").code == 3
    command = console.start("run", "-n", "1", "--name", "running", "train.py", "100000", out=tmp_path / "out")
    until(lambda: any(rank["steps"] > 60 for rank in console.ps("running").get("ranks", [])), "steps")
    for name, state in (("failed", "failed (3)"), ("running", "running")):
        page = tmp_path / f"{name}.html"
        assert console.argosy("report", name, "-o", str(page)).code == 0
        document, picture = look(browser, page)
        assert state in document
        assert "<svg" in document
        assert len(picture) > 10_000
    assert console.argosy("stop", "running").code == 0
    command.wait(60)
    run = OpenedRun(console.cwd / "runs" / "failed")
    numbers_are_those_of_sql(run, (tmp_path / "failed.html").read_text())


def test_a_page_that_asks_for_something_would_be_seen(browser: str, tmp_path: Path) -> None:
    page = tmp_path / "asks.html"
    page.write_text('<img src="http://example.invalid/x.png">')
    with pytest.raises(AssertionError):
        look(browser, page)


@pytest.mark.parametrize("ranks", [1, 1000])
def test_one_and_a_thousand_ranks_light_and_dark(browser: str, tmp_path: Path, ranks: int) -> None:
    recordings: list[Recording] = []
    for rank in range(ranks):
        one = Recording(rank)
        for step in range(40):
            one.span("forward", 100 + step * 50, 140 + step * 50).step(149 + step * 50)
        recordings.append(one)
    run = OpenedRun(write_run(tmp_path / "run", recordings, 2500))
    page = run.plot(tmp_path / "page.html")
    document, light = look(browser, page)
    _, dark = look(browser, page, dark=True)
    numbers_are_those_of_sql(run, document)
    assert corner(light) > 200
    assert corner(dark) < 60
