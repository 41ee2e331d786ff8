"""End in the way that the first argument names."""

import os
import signal
import sys
import threading


def in_a_thread() -> None:
    raise RuntimeError("in a thread")


how = sys.argv[1]
print("ending by", how)
if how == "text":
    raise SystemExit("text to stderr")
if how == "three":
    sys.exit(3)
if how == "large":
    sys.exit(259)
if how == "larger":
    sys.exit(10**30)
if how == "tuple":
    sys.exit((1, "two"))
if how == "_exit":
    print("not flushed is not lost under -u", end="")
    os._exit(5)
if how == "interrupt":
    raise KeyboardInterrupt("by hand")
if how == "interrupted":
    os.kill(os.getpid(), signal.SIGINT)
if how == "segv":
    os.kill(os.getpid(), signal.SIGSEGV)
if how == "abort":
    os.abort()
if how == "term":
    os.kill(os.getpid(), signal.SIGTERM)
if how == "thread":
    crew = threading.Thread(target=in_a_thread, name="crew")
    crew.start()
    crew.join()
if how == "daemon":
    threading.Thread(target=signal.pause, daemon=True).start()
if how == "hook":
    sys.excepthook = lambda kind, error, trace: print("hooked", kind.__name__, error, trace is None)
    raise ValueError("for the hook")
if how == "pipe":
    read, write = os.pipe()
    os.close(read)
    os.write(write, b"nobody listens")
if how == "closed":
    sys.stdout.close()
if how == "no_torch":
    sys.modules["torch"] = type(sys)("torch")
