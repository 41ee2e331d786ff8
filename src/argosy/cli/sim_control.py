"""`argosy sim control`: what the decisions that ship do on thousands of simulated hosts."""

import statistics
import time

import click

from argosy.cli.tables import print_json
from argosy.core import ConfigError


@click.command(name="control")
@click.option("--hosts", type=int, default=1000, show_default=True)
@click.option("-n", "--ranks", type=int, default=1, show_default=True, help="Ranks of each host.")
@click.option("--spares", type=int, help="Spare hosts. Default: one for every thousand, at least two.")
@click.option("--hours", type=float, default=1.0, show_default=True)
@click.option(
    "--faults", "profile", type=click.Choice(["calm", "llama3", "harsh"]), default="llama3", show_default=True
)
@click.option("--restart", "policy", default="rank", show_default=True, help="As in `argosy run --restart`.")
@click.option("--seed", type=int, default=0, show_default=True, help="The same seed gives the same events.")
@click.option("--seeds", type=int, default=1, show_default=True, help="With harsh: how many, from --seed on.")
@click.option("--replay", is_flag=True, help="With harsh: print every event that an agent heard.")
@click.option("--json", "as_json", is_flag=True, help="Machine-readable.")
def command(
    hosts: int,
    ranks: int,
    spares: int | None,
    hours: float,
    profile: str,
    policy: str,
    seed: int,
    seeds: int,
    replay: bool,
    as_json: bool,
) -> None:
    """Let the decisions that ship run hosts on virtual time, with failures, and check what must always hold.

    `llama3` fails hosts at the published rate of Llama 3's training. `harsh` is for small worlds, drawn from the seed,
    that live a minute in which messages are lost and agents, zygotes and hosts die all the time.
    """
    if seeds < 1:
        raise ConfigError(f"--seeds {seeds}: at least one seed is needed")
    if profile != "harsh" and (replay or seeds != 1):
        raise ConfigError(f"--replay and --seeds are not for {profile}", hint="--faults harsh")
    if profile == "harsh":
        live_harshly(range(seed, seed + seeds), replay=replay, as_json=as_json)
        return
    from argosy.control import parse_restart
    from argosy.sim import PROFILES, FleetPlan, sim_fleet

    spares = max(2, hosts // 1000) if spares is None else spares
    restart = parse_restart(policy, None)
    plan = FleetPlan(hosts=hosts, ranks_per_host=ranks, hours=hours, spare_hosts=spares, restart=restart)
    began = time.monotonic()
    found = sim_fleet(seed, PROFILES[profile], plan)
    took_s = time.monotonic() - began
    if as_json:
        print_json({"result": found, "took_s": took_s})
        return
    struck = ", ".join(f"{count} x {kind}" for kind, count in found.struck.items()) or "nothing"
    print(
        f"{found.hosts:,} hosts, {found.ranks:,} ranks, {found.hours:g} simulated hours in {took_s:.1f} s (seed {seed})"
    )
    print(f"happened: {struck}")
    print(f"{found.hosts_lost} hosts lost, {found.ranks_replaced} ranks replaced in {found.restarts} restarts")
    if found.replaced_after_s:
        typical, worst = statistics.median(found.replaced_after_s), found.replaced_after_s[-1]
        print(f"from the decision that a rank is lost until its next process: {typical:.2f} s, at most {worst:.2f} s")
    print(f"end: exit code {found.code}: {found.reason}")
    print(f"{found.events:,} events, digest {found.digest}; every invariant held")
    print(f"note: {found.simulated:,} hosts were simulated one by one; the others, to which nothing happened, as one")


def live_harshly(seeds: range, *, replay: bool, as_json: bool) -> None:
    """Check small worlds in which everything goes wrong; the first violation ends it with exit code 1."""
    from argosy.sim import Violation, random_life

    def tell(who: str, at_s: float, what: object) -> None:
        print(f"{at_s:9.3f}  {who:7}  {what}")

    events = 0
    for seed in seeds:
        try:
            run = random_life(seed, tell if replay else None)
        except Violation as violation:
            if as_json:
                print_json({"seed": seed, "violation": str(violation)})
            else:
                print(f"violated: {violation}")
                print(f"replay  argosy sim control --faults harsh --seed {seed} --replay")
            raise SystemExit(1) from None
        events += run.world.events
        if replay:
            end = run.finished[0]
            print(f"end: exit code {end.code}: {end.reason}; digest {run.world.digest}")
    if as_json:
        print_json({"seeds": len(seeds), "events": events, "violation": None})
    else:
        print(f"{len(seeds):,} worlds, {events:,} events; every invariant held")
