"""`argosy stacks`: show where the ranks are right now."""

import click

from argosy.core import format_ranks, parse_ranks


@click.command(short_help="Show where ranks are right now.")
@click.argument("run", default="last")
@click.option("--rank", "ranks", metavar="0-3,7", help="Only these ranks.")
@click.option("--native", is_flag=True, help="With C frames, of the first rank only (slower).")
@click.option("--json", "as_json", is_flag=True, help="Machine-readable.")
def command(run: str, ranks: str | None, native: bool, as_json: bool) -> None:
    """Show the Python stacks of RUN's ranks, equal ones once. The ranks are not disturbed."""
    from argosy.supervise import Stacks, TakeStacks, ask, find_living, reach_agent

    living = find_living(run)
    chosen = parse_ranks(ranks, living.size) if ranks else list(range(living.size))
    answer = ask(reach_agent(), TakeStacks(living.run, chosen, native))
    assert isinstance(answer, Stacks)
    if as_json:
        from argosy.cli.tables import print_json

        print_json(answer.stacks)
        return
    for group in answer.stacks:
        plural = "s" if len(group.ranks) > 1 else ""
        print(f"rank{plural} {format_ranks(group.ranks)} at {group.place or 'an unknown place'}")
        print(f"{group.text.rstrip()}\n")
    for note in answer.notes:
        print(note)
