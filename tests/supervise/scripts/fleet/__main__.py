"""What `-m fleet` runs."""

from . import ship

print("main of the fleet", __name__, __package__, __spec__.name, ship.__name__)
