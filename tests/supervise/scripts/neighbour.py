"""A module beside the scripts."""

from typing import Any

keep: list[Any] = []
greeting = "from the neighbour"
