"""A module of a package; imports its sibling relatively, and can be run with -m."""

import sys

from . import __name__ as family
from .cargo import Cargo

print(__name__, __package__, family, __spec__.name, __file__, sys.argv, sys.path[0])
print(Cargo.__module__, sorted(name for name in sys.modules if name.startswith("fleet")))
if __name__ == "__main__" and sys.argv[1:] == ["sink"]:
    Cargo().drop()
