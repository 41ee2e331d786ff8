"""An environment with packages of other people, for scripts that nobody here wrote.

Made on demand in `.cache/people` of the clone; it borrows torch and Argosy from the tests' environment.
"""

import fcntl
import site
import subprocess
import sys
from pathlib import Path

from console import REPOSITORY

PACKAGES = ["accelerate==1.15.0", "lightning==2.6.6", "transformers==5.22.2"]
PLACE = REPOSITORY / ".cache" / "people"


def python_of_people() -> str:
    """The interpreter of that environment; the first call downloads about 0.1 GB.

    Raises:
        CalledProcessError: pip failed; what it printed says why.
    """
    PLACE.parent.mkdir(exist_ok=True)
    python, stamp = PLACE / "bin" / "python", PLACE / "packages.txt"
    wanted = "\n".join([*PACKAGES, sys.executable])
    with (PLACE.parent / "people.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if stamp.exists() and stamp.read_text() == wanted:
            return str(python)
        print(f"making {PLACE}: {', '.join(PACKAGES)}, about 0.1 GB", file=sys.stderr, flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(PLACE)], check=True)
        borrow(python)
        subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-input", *PACKAGES], check=True)
        stamp.write_text(wanted)
    return str(python)


def borrow(python: Path) -> None:
    """Let `python` see the packages of the environment of the tests, after its own."""
    ask = [python, "-c", "import site; print(site.getsitepackages()[0])"]
    packages = subprocess.run(ask, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()
    lines = [f"import site; site.addsitedir({path!r})" for path in site.getsitepackages()]
    (Path(packages) / "zz-borrowed.pth").write_text("\n".join(lines) + "\n")
