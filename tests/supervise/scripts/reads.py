"""Read from standard input."""

import sys

print("first", input())
print("rest", sys.stdin.read().split(), repr(sys.stdin.readline()))
