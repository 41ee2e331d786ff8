"""How long calls between processes take, what they carry, and how soon a lost rank is known and back.

    python bench/calls.py [--quick] [--only ROW[:CONTENDER],...] [--repeat N] [--json PATH]

Each contender makes its processes, warms up, and times itself inside one process: start-up is no part of a call.
"""

import json
import sys
from functools import partial

from contenders import SCRIPTS, Stage, free_port
from harness import Contender, Failed, Goal, Options, Row, run_benches
from peers import python_of

DEADLINE_S = 300.0


def sample(stage: Stage, script: str, *args: str) -> list[float]:
    """What a script measured; its name begins with the peer whose interpreter runs it."""
    peer = script.partition("_")[0]
    python = python_of(peer) if peer in ("monarch", "ray") else sys.executable
    with stage.live([python, str(SCRIPTS / script), *args]) as command:
        command.time(DEADLINE_S)
        for _, line in reversed(command.lines):
            if line.startswith("["):
                return [float(value) for value in json.loads(line)]
        raise Failed(f"no values: {command.last_word()}")


def argosy(stage: Stage, what: str, count: int) -> list[float]:
    # Not through `live`: its mark changes with each sample, and with it the zygote.
    words = [sys.executable, str(SCRIPTS / "argosy_calls.py"), what, str(count)]
    with stage.unmarked(words) as command:
        command.time(DEADLINE_S)
        return [float(value) for value in json.loads(command.lines[-1][1])]


def contenders(stage: Stage, what: str, count: int, floors: str = "", peers: str = "monarch ray") -> list[Contender]:
    warm = what in ("mesh", "back", "spare")  # What is measured there begins with a zygote that has torch.
    found = [Contender(name="argosy", sample=partial(argosy, stage, what, count), warm_up=warm)]
    for floor in floors.split():
        extra = [str(free_port())] if floor == "rpc" else []
        args = (floor, what, str(count), *extra)
        found.append(Contender(name=floor, sample=partial(sample, stage, "floor_calls.py", *args)))
    for peer in peers.split():
        made = partial(sample, stage, f"{peer}_calls.py", what, str(count))
        found.append(Contender(name=peer, sample=made, repeat_max=2))
    return found


def small_rows(stage: Stage, options: Options) -> list[Row]:
    few, many = (8, 32) if options.quick else (64, 256)
    calls = 500 if options.quick else 3000
    return [
        Row(
            key="one",
            title="one small call and its reply, to an idle process",
            contenders=contenders(stage, "one", calls, "socket pipe rpc"),
            base="monarch",
            percentile=99,
            goals=[
                Goal(of="argosy", times_of="monarch", times=10),
                Goal(of="argosy", times_of="ray", times=10),
                Goal(of="argosy", times_of="socket", times=1 / 2.5),
                Goal(of="argosy", times_of="monarch", times=5, percentile=99),
            ],
        ),
        Row(
            key="busy",
            title="one small call to a process that computes in Python on another thread",
            contenders=contenders(stage, "busy", calls // 10),
            base="monarch",
            percentile=99,
        ),
        Row(
            key="gather",
            title=f"a call to {few} ranks and all replies",
            contenders=contenders(stage, "gather", few, "socket"),
            base="monarch",
            goals=[
                Goal(of="argosy", times_of="monarch", times=10),
                Goal(of="argosy", times_of="ray", times=20),
            ],
        ),
        Row(
            key="wide",
            title=f"a call to {many} ranks and all replies",
            contenders=contenders(stage, "gather", many, "socket", "monarch"),
            base="monarch",
            goals=[Goal(of="argosy", times_of="monarch", times=10)],
        ),
        Row(
            key="pipeline",
            title="small calls to one actor without waiting between them, per call",
            contenders=contenders(stage, "pipeline", 2 * calls, "socket pipe rpc"),
            base="monarch",
            goals=[Goal(of="argosy", times_of="monarch", times=15)],
        ),
        Row(
            key="actor",
            title="one small call from actor to actor",
            contenders=contenders(stage, "actor", calls),
            base="monarch",
            goals=[Goal(of="argosy", times_of="monarch", times=10)],
        ),
    ]


def other_rows(stage: Stage, options: Options) -> list[Row]:
    few, big, thousand = (8, 3, 64) if options.quick else (64, 8, 1000)
    return [
        Row(
            key="argument",
            title="a call with 256 MiB as its argument",
            contenders=contenders(stage, "argument", big),
            base="monarch",
            goals=[
                Goal(of="argosy", times_of="monarch", times=10),
                Goal(of="argosy", times_of="ray"),
            ],
        ),
        Row(
            key="result",
            title="a call with 256 MiB as its result",
            contenders=contenders(stage, "result", big),
            base="monarch",
            goals=[Goal(of="argosy", times_of="monarch", times=10), Goal(of="argosy", times_of="ray")],
        ),
        Row(
            key="mesh",
            title=f"from asking for {few} ranks with torch to all answers (Argosy warm)",
            contenders=contenders(stage, "mesh", few),
            base="monarch",
            goals=[Goal(of="argosy", times_of="monarch", times=20), Goal(of="argosy", times_of="ray", times=30)],
        ),
        Row(
            key="memory",
            title=f"memory of {thousand} ranks that imported torch and answer calls",
            contenders=contenders(stage, "memory", thousand, peers=""),
            base="argosy",
            unit="GB",
            goals=[Goal(of="argosy", at_most=24 * 1.0737)],
        ),
        Row(
            key="lost",
            title="from SIGKILL of a rank to the error at its caller",
            contenders=contenders(stage, "lost", 4),
            base="ray",
            goals=[Goal(of="argosy", at_most=0.010)],
        ),
        Row(
            key="back",
            title="from SIGKILL of a rank to an answer of its replacement, torch imported",
            contenders=contenders(stage, "back", 4, peers="ray"),
            base="ray",
            goals=[Goal(of="argosy", at_most=0.150), Goal(of="argosy", times_of="ray", times=6)],
        ),
        Row(
            key="spare",
            title="the same, with a spare process ready",
            contenders=contenders(stage, "spare", 4, peers=""),
            base="argosy",
        ),
    ]


def main() -> int:
    with Stage() as stage:
        return run_benches(__doc__ or "", lambda options: [*small_rows(stage, options), *other_rows(stage, options)])


if __name__ == "__main__":
    sys.exit(main())
