"""The examples with actors run as they say, and a notebook: define, spawn, call, interrupt, kill a rank, restart."""

import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from console import REPOSITORY, Console
from meshes import gone, owner, until_gone

EXAMPLES = {
    "survive_a_kill.py": "rank 2 replaced, generation 1",
    "parameter_server.py": "y = 3.00 x + 2.00",
    "service.py": "[200, 200, 200, 200]",
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_does_what_it_says(console: Console, name: str):
    ended = console.run([sys.executable, str(REPOSITORY / "examples" / name)])
    assert ended.code == 0, ended.text
    assert EXAMPLES[name] in ended.text


class Notebook:
    """A kernel that cells are sent to."""

    def __init__(self) -> None:
        from jupyter_client.manager import KernelManager

        self.manager = KernelManager(kernel_name="python3")
        self.manager.start_kernel(env=dict(os.environ))
        self._connect()

    def _connect(self) -> None:
        self.client = self.manager.blocking_client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=60)

    def cell(self, code: str, interrupt_at: str = "") -> str:
        """Run a cell; returns what it showed. When that holds `interrupt_at`, the kernel is interrupted."""
        shown: list[str] = []
        interrupts = [interrupt_at] if interrupt_at else []

        def hear(message: dict[str, Any]) -> None:
            content = message["content"]
            shown.append(content.get("text", "") + "\n".join(content.get("traceback", [])))
            shown.append(content.get("data", {}).get("text/plain", ""))
            if interrupts and interrupts[0] in "".join(shown):
                interrupts.clear()
                self.manager.interrupt_kernel()

        self.client.execute_interactive(code, timeout=300, output_hook=hear)
        return re.sub(r"\x1b\[[0-9;]*m", "", "".join(shown))

    def restart(self) -> None:
        self.client.stop_channels()
        self.manager.restart_kernel(now=True)
        self._connect()

    def close(self) -> None:
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)
        self.manager.cleanup_resources()


@pytest.mark.filterwarnings("ignore")
def test_a_notebook(tmp_path: Path):
    pytest.importorskip("ipykernel")
    pytest.importorskip("jupyter_client")
    with owner(tmp_path):
        notebook = Notebook()
        try:
            sail(notebook)
        finally:
            notebook.close()


def sail(notebook: Notebook) -> None:
    shown = notebook.cell(
        "import argosy, os, signal, time\n"
        "class Worker:\n"
        "    def pid(self): return os.getpid()\n"
        "    def say(self): print('a word from a rank', flush=True)\n"
        "    def sleep(self): print('going to sleep', flush=True); time.sleep(600)\n"
        "cluster = argosy.local()\n"
        "mesh = cluster.mesh(ranks=2, restart=argosy.Restart.rank())\n"
        "workers = mesh.spawn(Worker)\n"
        "print('pids', *workers.pid().gather())\n"
    )
    found = re.search(r"pids (\d+) (\d+)", shown)
    assert found, shown
    pids = [int(found[1]), int(found[2])]
    assert "a word from a rank" in notebook.cell("workers.say().gather(); time.sleep(1)")
    interrupted = notebook.cell("print('calling'); workers[0].sleep().get()", interrupt_at="to sleep")
    assert "KeyboardInterrupt" in interrupted
    assert str(pids[0]) in notebook.cell("workers[0].pid().get()")
    replaced = notebook.cell(
        f"os.kill({pids[1]}, signal.SIGKILL)\n"
        "print(mesh.events.wait('replaced', rank=1))\n"
        "print('now', workers[1].pid().get())\n"
    )
    assert "rank 1 replaced, generation 1" in replaced
    again = re.search(r"now (\d+)", replaced)
    assert again, replaced
    assert not gone(int(again[1]))
    notebook.restart()
    until_gone(pids[0], int(again[1]))
    shown = notebook.cell("import argosy; print(argosy.local().mesh(ranks=1).run(lambda: 42).gather())")
    assert "[42]" in shown
