"""More of what checkpoints are measured by: two ranks, hand-over, plans carried out. Rows of bench/checkpoint.py."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from harness import Contender, Failed, Goal, Options, Row

from argosy.checkpoint import Keeping, Saver
from argosy.checkpoint.arena import Arena, memory_of
from argosy.checkpoint.keeper.life import Life, known_keepers
from argosy.checkpoint.keeper.messages import Filled, Hello, Lend, Lent, Look, keeper_decoder
from argosy.fabric import connect

SCRIPTS = Path(__file__).parent / "scripts"
WAYS = [
    "memcpy",
    "argosy, memory",
    "argosy",
    "argosy, keeper",
    "DCP save",
    "DCP async thread",
    "DCP async process",
    "DCP async cached",
]


def two_ranks(way: str, directory: Path, megabytes: int) -> list[dict[str, float]]:
    """What saves cost two ranks, one try per save."""
    path = directory / way.replace(" ", "-").replace(",", "")
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    env = os.environ | {"WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    env |= {"RENDEZVOUS": str(path / "store")}
    command = [sys.executable, str(SCRIPTS / "lost.py"), way, str(path / "run"), str(megabytes)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    ranks = [subprocess.Popen(command, env=env | {"RANK": str(rank)}, text=True, **pipes) for rank in (0, 1)]
    try:
        out, err = ranks[0].communicate(timeout=300)
        ranks[1].communicate(timeout=60)
    except subprocess.TimeoutExpired:
        raise Failed("not within 300 s") from None
    finally:
        for each in ranks:
            each.kill()
    if ranks[0].returncode:
        raise Failed(err.strip().splitlines()[-1][:200] if err.strip() else f"exit {ranks[0].returncode}")
    return json.loads(out.splitlines()[-1])


def hand_over(size: int) -> list[float]:
    """Seconds from saying that an arena is filled until the keeper has said that it holds it."""
    with tempfile.TemporaryDirectory(prefix="argosy-") as home:
        os.environ["ARGOSY_RUNTIME_DIR"] = home
        record = Path(home, "run.json")
        record.write_text('{"launch": 1, "state": "running"}')
        keeping = Keeping(life=Life("bench", home, 1, ""), bytes_max=4 * size)
        saver = Saver(f"{home}/run", keeping=keeping)
        link = connect(known_keepers(f"{home}/run")[0], keeper_decoder, "the keeper")
        # As a second rank that never comes: nothing becomes whole, so nothing is written while this is timed.
        link.send(Hello(0, 2, f"{home}/run", []))
        link.wait(10)
        link.send(Lend(size))
        lent, fds = link.wait(60)
        assert isinstance(lent, Lent)
        arena = Arena(size, fds[0], lent.slot)
        draft = memory_of(b"{}")
        taken: list[float] = []
        for number in range(200):
            arena.begin()
            sequence = arena.finish()
            begun = time.perf_counter()
            link.send(Filled(lent.slot, sequence, f"step-{number:012d}-aa", number, False, ""), [draft])
            link.send(Look())
            link.wait(10)
            taken.append(time.perf_counter() - begun)
            link.send(Lend(size))
            link.wait(60)
        link.close()
        saver.close()
        arena.close()
        os.close(draft)
        record.write_text('{"launch": 1, "state": "ended"}')
        del os.environ["ARGOSY_RUNTIME_DIR"]
    return taken


def state_rows(directory: Path, options: Options) -> list[Row]:
    megabytes, arena_bytes = (128, 64 << 20) if options.quick else (768, 1 << 30)
    seen: dict[str, list[dict[str, float]]] = {}

    def measured(way: str, key: str) -> Callable[[], list[float]]:
        def sample() -> list[float]:
            if key == "lost":
                seen[way] = two_ranks(way, directory, megabytes)
            return [each[key] for each in seen.get(way, [])]

        return sample

    def row(key: str, title: str, goals: list[Goal]) -> Row:
        contenders = [Contender(name=way, sample=measured(way, key), repeat_max=1) for way in WAYS]
        return Row(key=f"two-{key}", title=title, base="DCP save", contenders=contenders, goals=goals)

    gibibytes = megabytes / 1024
    stall_s = 0.010 + 0.005 * gibibytes
    return [
        row(
            "lost",
            f"training time lost to a save, 2 ranks, {gibibytes:.2g} GiB",
            [
                Goal(of="argosy, memory", times_of="memcpy", times=1 / 1.5),
                *(Goal(of="argosy", times_of=way, times=3) for way in WAYS if way.startswith("DCP")),
            ],
        ),
        row(
            "stall",
            "time that a save blocks training: in its call, and before the next step, 2.5 memcpys later",
            [Goal(of=way, at_most=stall_s) for way in WAYS if way.startswith("argosy")],
        ),
        row("longest", "longest step minus the usual one: includes the CPU time of copy and write", []),
        Row(
            key="handover",
            title="hand a filled arena to the keeper and back",
            base="keeper",
            contenders=[Contender(name="keeper", sample=lambda: hand_over(arena_bytes), repeat_max=1)],
            goals=[Goal(of="keeper", at_most=100e-6)],
        ),
    ]
