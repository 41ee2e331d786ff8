"""`argosy plan`: which recipe trains a model fastest on given chips, predicted on this machine."""

from typing import TYPE_CHECKING

import click

from argosy.cli.tables import print_json, print_table
from argosy.core import ConfigError

if TYPE_CHECKING:
    from argosy.cost import Chip, Prediction
    from argosy.sim import GoodputRange

HEADINGS = ["RECIPE", "STEP", "80% INTERVAL", "MFU", "GOODPUT", "MEMORY", "PRICES"]


@click.command(short_help="Predict how fast a model trains on given chips, and rank the recipes.")
@click.argument("target", required=False)
@click.option("--chips", metavar="COUNTxCHIP", help="As in 1024xh100, or 8xmy.toml.")
@click.option("--rows", type=int, help="Rows of a batch over all chips. Default: one per chip.")
@click.option("--recipe", "texts", multiple=True, help="Only this recipe, as in 'fsdp=8 micro=2'. May be repeated.")
@click.option("--top", type=int, default=10, show_default=True, help="How many recipes to show.")
@click.option(
    "--mtbf-days", type=float, default=264.0, show_default=True, help="Between failures of one host, for the goodput."
)
@click.option("--score", "scored", metavar="FILE", help="Score the price model on measured steps instead.")
@click.option("--json", "as_json", is_flag=True, help="Machine-readable.")
def command(
    target: str | None,
    chips: str | None,
    rows: int | None,
    texts: tuple[str, ...],
    top: int,
    mtbf_days: float,
    scored: str | None,
    as_json: bool,
) -> None:
    """Predict recipes for TARGET, a script FILE[:NAME] that defines `training`, an argosy.graph.Training.

    Nothing is allocated and no accelerator is needed.
    """
    if scored is not None:
        print_score(scored, as_json=as_json)
        return
    if target is None or chips is None:
        raise ConfigError("say what to plan", hint="argosy plan train.py --chips 64xh100")
    from argosy.cost import NO_GPU, Recipe, parse_chips
    from argosy.graph import Planner, load_training, plan

    count, chip = parse_chips(chips)
    recipes = [Recipe.parse(text) for text in texts]
    for recipe in recipes:
        if recipe.world != count:
            raise ConfigError(f"the recipe is for {recipe.world} ranks, the chips are {count}: {recipe}")
    good, refused = plan(Planner(load_training(target)), count, chip, rows or count, recipes or None)
    goodputs = [goodput_of(each, count, chip, mtbf_days) for each in good[:top]]
    if as_json:
        print_json({"recipes": good, "goodput": goodputs, "refused": refused, "note": NO_GPU})
        return
    table = [
        [
            str(each.recipe),
            f"{each.step_s:.3g} s",
            f"{each.low_s:.3g}-{each.high_s:.3g}",
            f"{each.mfu:.0%}",
            f"{goodput.median:.0%} ({goodput.low:.0%}-{goodput.high:.0%})",
            f"{each.memory_bytes / 1e9:.1f} GB",
            ", ".join(f"{share:.0%} {tier}" for tier, share in each.tiers.items() if share >= 0.005),
        ]
        for each, goodput in zip(good, goodputs, strict=False)
    ]
    if table:
        print_table(HEADINGS, table, right=[1, 2, 3, 4, 5])
    print(f"{len(good)} recipes fit, {len(refused)} were refused" + (", for example:" if refused else ""))
    reasons: dict[str, str] = {}
    for each in refused:
        reasons.setdefault(each.reason.partition(":")[0], f"  {each.recipe}: {each.reason}")
    print("\n".join(list(reasons.values())[:5]), end="\n" if reasons else "")
    print(f"goodput: a host fails every {mtbf_days:g} days (a guess: --mtbf-days); `argosy sim goodput` has the rest")
    print(f"note: {NO_GPU}")


def goodput_of(found: "Prediction", chips: int, chip: "Chip", mtbf_days: float) -> "GoodputRange":
    """The goodput of a month with this step time, with the usual costs of saving and restarting."""
    from argosy.sim import Fleet, sample_goodput

    host = next((link.ranks for link in chip.links if link.ranks), 1)
    fleet = Fleet(hosts=max(1, chips // host), spares=2, step_s=found.step_s, mtbf_host_days=mtbf_days)
    return sample_goodput(fleet, seeds=10)


def print_score(path: str, *, as_json: bool) -> None:
    """Score the shipped constants, and constants fitted with each model size left out."""
    from argosy.cost import CONSTANTS, leave_sizes_out, read_rows, score, score_shipped

    rows, seconds = read_rows(path)
    shipped = score_shipped(rows, seconds)
    try:
        left_out = score(rows, seconds, leave_sizes_out(rows, seconds))
    except ConfigError:
        left_out = []
    if as_json:
        print_json({"constants": CONSTANTS, "shipped": shipped, "sizes_left_out": left_out})
        return
    table = [
        [what, each.set, str(each.rows), f"{each.error:.1%}", f"{each.regret:.1%}", f"{each.flat:.0%}"]
        for what, scores in (("shipped constants", shipped), ("fitted, size left out", left_out))
        for each in scores
    ]
    print_table(["PREDICTED BY", "SET", "ROWS", "MEAN ERROR", "REGRET", "FLAT MFU"], table, right=[2, 3, 4, 5])
    print(f"{CONSTANTS} fitted constants. Fitted to A100 runs that vTrain published; nothing here ran on a GPU.")
