"""Everything that writes: warnings, logging, children, raw descriptors, odd bytes, carriage returns."""

import logging
import os
import subprocess
import sys
import warnings

logging.warning("before any configuration")
logging.basicConfig(level=logging.INFO, format="%(levelname)s %(module)s %(message)s", force=True)
logging.info("configured")
logging.captureWarnings(False)
warnings.warn("a user's warning", stacklevel=1)
warnings.warn("old ways", DeprecationWarning, stacklevel=1)


print("first")
os.write(1, b"second\n")
print("third")
child = "import sys; print('child'); print('child err', file=sys.stderr)"
subprocess.run([sys.executable, "-c", child], check=True)
os.system("echo shell; echo shell err >&2")
sys.stdout.flush()
if not os.fork():
    print("forked")
    os._exit(0)
os.wait()
sys.stdout.buffer.write(b"\xff\xfe not text \x00 \n")
print("\u00e9t\u00e9 \u2603 \U0001f6a2")
print("1%\r2%\r3%", end="\r", file=sys.stderr, flush=True)
print("a long line", "x" * 300_000)
print("\n\nblank lines\n\n", end="")
print("on stderr", file=sys.stderr)
print("eof follows without newline", end="")
