"""What failures cost a training, and what it costs to be ready for them.

    python bench/train.py [--quick] [--only ROW[:CONTENDER],...] [--repeat N] [--json PATH]

Four ranks train the model of examples/gpt.py; the bench kills them. torchrun's script saves with DCP every 10 steps,
Lightning's, which torchrun starts too, with a ModelCheckpoint; torchft's replicas are started again at once by a shell.
The last two: `python bench/peers.py --setup lightning torchft`.
"""

import contextlib
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial

from contenders import SCRIPTS, Stage
from harness import Contender, Failed, Goal, Options, Row, run_benches
from voyages import (
    SIZE,
    UP_S,
    Killed,
    Voyage,
    argosy_voyage,
    kill_in_turn,
    lightning_voyage,
    open_stage,
    torchft_voyage,
    torchrun_voyage,
)

Start = Callable[[], contextlib.AbstractContextManager[Voyage]]
SAVE_EVERY = 10
ARGOSY = ("argosy DDP", "argosy FSDP2")
ALLOWED_STEPS = 4
"""For which a kill may cost no more than a second beyond."""
DEAR = {"torchrun": 1, "torchft": 1, "lightning": 2}
"""How often these take part: most tries of those at their defaults are lost, or take a minute."""


class Kills:
    """Kills that several rows look at: each contender's are made once a round, by whichever row asks first."""

    def __init__(self, starts: dict[str, Start], victims: Sequence[int]) -> None:
        self._starts, self._victims = starts, victims
        self._made: dict[str, list[list[Killed | Failed]]] = {name: [] for name in starts}
        self._read: dict[tuple[str, str], int] = {}

    def look(self, row: str, name: str, value: Callable[[Killed], float]) -> list[float | Failed]:
        number = self._read.get((row, name), 0)
        if number == len(self._made[name]):
            with self._starts[name]() as voyage:
                self._made[name].append(kill_in_turn(voyage, self._victims, seed=number))
        self._read[row, name] = number + 1
        return [value(each) if isinstance(each, Killed) else each for each in self._made[name][number]]

    def contenders(self, row: str, value: Callable[[Killed], float], only: str = "") -> list[Contender]:
        """Those whose names begin with `only`."""
        return [
            Contender(name=name, sample=partial(self.look, row, name, value), repeat_max=DEAR.get(name))
            for name in self._starts
            if name.startswith(only)
        ]


def starts(stage: Stage) -> dict[str, Start]:
    """Everybody; torchrun and torchft at their defaults and at the best settings known."""
    return {
        "argosy DDP": partial(argosy_voyage, stage, "ddp"),
        "argosy FSDP2": partial(argosy_voyage, stage, "fsdp2"),
        "torchrun best": partial(torchrun_voyage, stage, SAVE_EVERY, best=True),
        "torchft best": partial(torchft_voyage, stage, best=True),
        "lightning": partial(lightning_voyage, stage, SAVE_EVERY),
        "torchrun": partial(torchrun_voyage, stage, SAVE_EVERY, best=False),
        "torchft": partial(torchft_voyage, stage, best=False),
    }


def beyond(killed: Killed) -> float:
    return killed.next_s - ALLOWED_STEPS * killed.calm_s


def killed_rows(stage: Stage, victims: Sequence[int]) -> list[Row]:
    """All of the same kills."""
    kills, best = Kills(starts(stage), victims), "torchrun best"
    tenfold = [Goal(of=name, times_of=best, times=10) for name in ARGOSY]
    return [
        Row(
            key="killed",
            title="from SIGKILL of one of 4 ranks to the next new step (torchft: of the three survivors)",
            base=best,
            contenders=kills.contenders("killed", lambda killed: killed.next_s),
            goals=[*tenfold, *(Goal(of=name, times_of="torchft best", times=2) for name in ARGOSY)],
        ),
        Row(
            key="whole",
            title="the same, to the first new step of the replacement",
            base=best,
            contenders=kills.contenders("whole", lambda killed: killed.whole_s),
            goals=tenfold,
        ),
        Row(
            key="beyond",
            title=f"from SIGKILL to the next new step, minus {ALLOWED_STEPS} undisturbed steps",
            base="",
            contenders=kills.contenders("beyond", beyond, "argosy"),
            goals=[Goal(of=name, at_most=1.0) for name in ARGOSY],
        ),
        Row(
            key="calm",
            title="an undisturbed step before those kills, without saving",
            base=best,
            contenders=kills.contenders("calm", lambda killed: killed.calm_s),
        ),
        Row(
            key="lost",
            title=f"steps repeated after a kill (torchrun saves every {SAVE_EVERY})",
            unit="steps",
            base="",
            contenders=kills.contenders("lost", lambda killed: float(killed.redone)),
            goals=[Goal(of="argosy DDP", at_most=0, percentile=99), Goal(of="argosy FSDP2", at_most=1, percentile=99)],
        ),
    ]


def rank0_row(stage: Stage) -> Row:
    everybody = starts(stage)
    kills = Kills({name: everybody[name] for name in (*ARGOSY, "torchrun best", "torchft best")}, [0])
    return Row(
        key="rank0",
        title="from SIGKILL of rank 0 to the next new step",
        base="torchrun best",
        contenders=kills.contenders("rank0", lambda killed: killed.next_s),
        goals=[Goal(of=name, times_of="torchrun best", times=10) for name in ARGOSY],
    )


def gloo_row(stage: Stage, victims: Sequence[int]) -> Row:
    """As between hosts; torchft's time is in the row `killed`."""
    kinds = {"argosy DDP": "ddp", "argosy FSDP2": "fsdp2"}
    kills = Kills(
        {name: partial(argosy_voyage, stage, kind, collectives="gloo") for name, kind in kinds.items()}, victims
    )
    return Row(
        key="gloo",
        title="from SIGKILL to the next new step, with Gloo inside instead of shared memory",
        base="",
        contenders=kills.contenders("gloo", lambda killed: killed.next_s),
        goals=[Goal(of="argosy DDP", at_most=1.0), Goal(of="argosy FSDP2", at_most=1.5)],
    )


def compiled_row(stage: Stage, victims: Sequence[int]) -> Row:
    kills = Kills({"argosy DDP": partial(argosy_voyage, stage, "ddp", "compiled")}, victims)
    return Row(
        key="compiled",
        title="from SIGKILL to the next new step of a compiled model, with a warm cache",
        base="",
        contenders=kills.contenders("compiled", lambda killed: killed.next_s),
        goals=[Goal(of="argosy DDP", at_most=5.0)],
    )


# --- cost: a step when nothing fails


class Costs:
    """The three figures of scripts/train_cost.py, by the contender that shows each."""

    def __init__(self, stage: Stage, what: str, steps: int) -> None:
        self._stage, self._what, self._steps = stage, what, steps
        self._waiting: dict[str, list[float]] = {}

    def sample(self, name: str) -> float:
        if not self._waiting.get(name):
            for figure, value in self._measure().items():
                self._waiting.setdefault(figure, []).append(value)
        return self._waiting[name].pop(0)

    def _measure(self) -> dict[str, float]:
        home, run_dir = self._stage.new_dir(), self._stage.new_dir()
        words = ["run", "-n", str(SIZE), "--dir", str(run_dir), str(SCRIPTS / "train_cost.py"), str(home)]
        self._stage.time_argosy(*words, str(self._steps), self._what, deadline_s=UP_S + self._steps)
        return json.loads((home / "cost.json").read_text())

    def contenders(self, names: dict[str, str]) -> list[Contender]:
        return [Contender(name=name, sample=partial(self.sample, figure)) for figure, name in names.items()]


def cost_rows(stage: Stage, steps: int) -> list[Row]:
    cost, keeping = Costs(stage, "run", steps), Costs(stage, "keeping", steps)
    return [
        Row(
            key="cost",
            title="a step of 4 ranks with `Run` and without, in turns (0.5 ms are 1% of a 50 ms step)",
            unit="ms",
            base="plain DDP",
            contenders=cost.contenders({"with": "in a run", "without": "plain DDP", "cost": "difference"}),
            goals=[Goal(of="difference", at_most=0.3), Goal(of="difference", at_most=0.5)],
        ),
        Row(
            key="keeping",
            title="a step of 4 ranks with FSDP2, with the shards kept at every step and without, in turns",
            unit="ms",
            base="not kept",
            contenders=keeping.contenders({"with": "kept", "without": "not kept", "cost": "difference"}),
        ),
    ]


# --- goodput: kills all the time


CALM = "nobody killed"


def wasted(start: Start, every_s: float, for_s: float, *, killing: bool) -> float:
    """Percent of the time in which no step was made that counts, with a rank killed every so often, or none.

    A kill that finds its rank not back yet is left out, which spares those that take long; half of them must hit.
    Where nobody is killed, what is lost is the machine's: steps that take longer than their median.
    """
    victims, kills, planned = random.Random(0), 0, int(for_s / every_s)
    with start() as voyage:
        voyage.wait_calm(UP_S)
        began = time.time()
        for number in range(1, planned + 1):
            time.sleep(max(0.0, began + number * every_s - time.time()))
            if voyage.command.ended:
                raise Failed(f"ended: {voyage.command.last_word()}")
            if killing:
                with contextlib.suppress(Failed):  # It was not back: nothing to kill.
                    voyage.kill(victims.randrange(SIZE))
                    kills += 1
        time.sleep(every_s)
        if killing and kills < planned / 2:
            raise Failed(f"only {kills} of {planned} kills found the rank there")
        wall = time.time() - began
        counted = voyage.counted(began)
        made = len({each.step for each in counted})
        return 100 * (1 - made * statistics.median(each.seconds for each in counted) / wall)


def goodput_row(stage: Stage, every_s: float, for_s: float) -> Row:
    everybody = starts(stage)
    everybody[CALM] = everybody["argosy DDP"]
    span = f"{for_s:g} s, the others for a quarter of it"
    return Row(
        key="goodput",
        title=f"percent of time lost with a kill every {every_s:g} s for {span} (goodput is the rest)",
        unit="%",
        base="torchrun best",
        contenders=[
            Contender(
                name=name,
                sample=partial(
                    wasted, everybody[name], every_s, for_s if name in ARGOSY else for_s / 4, killing=name != CALM
                ),
                repeat_max=1,
            )
            for name in ("argosy DDP", CALM, "torchrun best", "lightning", "torchft best")
        ],
        goals=[Goal(of="argosy DDP", at_most=5.0)],
    )


def rows(stage: Stage, options: Options) -> Sequence[Row]:
    quick = options.quick
    return [
        *killed_rows(stage, [2] if quick else [2, 1, 3]),
        rank0_row(stage),
        gloo_row(stage, [2] if quick else [2, 1, 3]),
        compiled_row(stage, [2]),
        *cost_rows(stage, 100 if quick else 400),
        goodput_row(stage, 10.0 if quick else 30.0, 40.0 if quick else 600.0),
    ]


def main() -> int:
    with open_stage() as stage:
        return run_benches("Training through failures, Argosy beside its peers.", partial(rows, stage))


if __name__ == "__main__":
    sys.exit(main())
