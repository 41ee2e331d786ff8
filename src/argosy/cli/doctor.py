"""`argosy doctor`: check this machine and this installation."""

import sys

import click

from argosy.cli.tables import print_json, print_table


@click.command(short_help="Check this machine and this installation.")
@click.option("--json", "as_json", is_flag=True, help="Machine-readable.")
def command(as_json: bool) -> None:
    """Check what Argosy needs on this machine, and say what to do about problems.

    The exit code is 1 if a check fails. Warnings cost comfort or speed only.
    """
    from argosy.cli.clean_plan import count
    from argosy.cli.doctor_judge import judge_machine
    from argosy.cli.doctor_measure import measure_machine

    checks = judge_machine(measure_machine())
    states = [check.state for check in checks]
    if as_json:
        print_json(checks)
    else:
        rows: list[list[str]] = []
        for check in checks:
            rows.append([check.state, check.name, check.says])
            rows += [["", "", f"-> {check.hint}"]] if check.hint else []
        print_table(["", "CHECK", "RESULT"], rows)
        print(f"\n{states.count('ok')} ok, {count(states.count('warn'), 'warning')}, {states.count('fail')} failed")
    sys.exit(1 if "fail" in states else 0)
