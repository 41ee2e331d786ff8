"""Modules that look at __main__, at the stack or at their own files: inspect, pdb-like tools, resources."""

import importlib.resources
import inspect
import linecache
import pydoc
import sys
import traceback
from dataclasses import dataclass
from typing import get_type_hints

import neighbour


@dataclass
class Port:
    name: "str"
    ships: "list[Port] | None" = None


def here() -> str:
    frame = inspect.currentframe()
    assert frame is not None
    return f"{inspect.getframeinfo(frame).filename} {frame.f_lineno} {frame.f_globals is globals()}"


print(here(), inspect.getsource(here).splitlines()[0], inspect.getmodule(here) is sys.modules["__main__"])
print(get_type_hints(Port), Port.__module__, repr(Port("Cork")), here.__qualname__)
print(inspect.getfile(Port), inspect.getsourcelines(Port)[1], linecache.getline(__file__, 1), end="")
print(neighbour.__file__, neighbour.greeting, importlib.resources.files("fleet").name)
print(pydoc.locate("__main__.Port") is Port)
try:
    Port.sail()
except AttributeError:
    print(traceback.format_exc(), end="")
