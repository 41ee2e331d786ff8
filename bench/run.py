"""Run all benches, one after the other, with the same options.

    python bench/run.py [--quick] [--repeat N] [--json DIRECTORY]

The machine should be quiet; a full run takes well over an hour on two cores, a quick one some minutes.
"""

import argparse
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
BENCHES = (
    "control",
    "launch",
    "failures",
    "researcher",
    "data",
    "checkpoint",
    "collectives",
    "calls",
    "train",
    "adapters",
    "graph",
    "observe",
)


def main() -> int:
    parser = argparse.ArgumentParser(description="Run all benches.")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--repeat", type=int)
    parser.add_argument("--json", metavar="DIRECTORY", type=Path, help="write <bench>.json files there")
    args = parser.parse_args()
    code = 0
    for bench in BENCHES:
        options = ["--quick"] if args.quick else []
        if args.repeat:
            options += ["--repeat", str(args.repeat)]
        if args.json:
            args.json.mkdir(parents=True, exist_ok=True)
            options += ["--json", str(args.json / f"{bench}.json")]
        print(f"== bench/{bench}.py {' '.join(options)}", flush=True)
        code = subprocess.run([sys.executable, str(HERE / f"{bench}.py"), *options], check=False).returncode or code
    return code


if __name__ == "__main__":
    sys.exit(main())
