"""What runs after the last line: threads, atexit, destructors, buffers of files that nobody closed."""

import atexit
import sys
import threading
import time
import weakref

import neighbour


class Bell:
    def __init__(self, name: str) -> None:
        self.name = name

    def __del__(self) -> None:
        print("bell", self.name, "modules still here:", sys is not None)


class Loop:
    """Part of a cycle: only a collection ends it."""

    def __init__(self) -> None:
        self.me = self

    def __del__(self) -> None:
        print("loop broken")


def late() -> None:
    time.sleep(0.3)
    print("thread done, main alive:", threading.main_thread().is_alive())


left_open = open("left_open.txt", "w")  # noqa: SIM115  (left open on purpose)
left_open.write("all of it")
neighbour.keep.append(Bell("in a module"))
last = Bell("global")
cycle = Loop()
weakref.finalize(last, print, "finalized")
atexit.register(print, "atexit: registered first")
atexit.register(print, "atexit: registered last")
threading.Thread(target=late).start()
sys.stdout.write("main done, no newline")
