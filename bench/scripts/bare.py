"""A rank without torch: waits for the others over TCP and goes.   bare.py PORT"""

import sys

from tcp_barrier import tcp_barrier

tcp_barrier(int(sys.argv[1]))
