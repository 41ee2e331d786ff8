"""What a script can see of itself and of its process."""

import os

if __name__ == "__main__":
    print("globals", sorted(globals()))

import resource
import signal
import sys
import threading

main = sys.modules["__main__"]
print("name", __name__, "file", __file__, "doc", __doc__)
print("spec", __spec__, "package", __package__, "cached", __cached__, "annotations", __annotations__)
print("loader", type(__loader__).__name__, __loader__.name, __loader__.path)
print("builtins", __builtins__, type(__builtins__).__name__)
print("main", main.__dict__ is globals(), main.__name__, main.__file__, repr(main))
print("argv", sys.argv, "cwd", os.getcwd(), "path", sys.path, "flags", sys.flags.isolated, sys.flags.optimize)
print("executable", sys.executable, sys.prefix, "orig_argv", sys.orig_argv[-len(sys.argv) :])
print("threads", [thread.name for thread in threading.enumerate()], threading.current_thread().name)
print("main thread", threading.main_thread() is threading.current_thread(), threading.get_ident() > 0)
print("umask", oct(os.umask(0o22)), "nice", os.nice(0), "scheduler", os.sched_getscheduler(0))
print("affinity", os.sched_getaffinity(0))
for name in ("RLIMIT_NOFILE", "RLIMIT_CORE", "RLIMIT_NPROC", "RLIMIT_AS", "RLIMIT_STACK"):
    print(name, resource.getrlimit(getattr(resource, name)))
for number in signal.valid_signals():
    handler = signal.getsignal(number)
    if handler != signal.SIG_DFL:
        print("signal", number, handler)
with open("/proc/self/status") as status:
    for line in status:
        if line.startswith(("SigBlk", "SigIgn")):
            print(line, end="")
for stream in (sys.stdin, sys.stdout, sys.stderr):
    print(stream.name, stream.mode, stream.encoding, stream.errors, stream.fileno(), stream.isatty())
    print(stream is getattr(sys, f"__{stream.name[1:-1]}__"), stream.newlines)
print("out", sys.stdout.write_through, sys.stdout.line_buffering, sys.stderr.line_buffering)
print("hooks", sys.excepthook is sys.__excepthook__, sys.displayhook is sys.__displayhook__)
print("trace", sys.gettrace(), sys.getprofile(), sys.getrecursionlimit(), sys.getswitchinterval())
