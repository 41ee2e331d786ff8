"""One end of a queue, in a process of its own: puts numbered items, or takes and commits as a rank would.

queue_end.py DIRECTORY put FIRST          until it is killed; prints each number when `put` has returned
queue_end.py DIRECTORY take RANK SIZE N   steps up to N items; prints and commits them; goes on at its file `cursorRANK`
"""

import itertools
import sys
from pathlib import Path

from argosy.data import Queue

directory, verb, *words = sys.argv[1:]
queue = Queue(Path(directory, "queue"), batch=8, capacity=24, patience_s=300)
if verb == "put":
    for number in itertools.count(int(words[0])):
        queue.put({"number": number, "content": bytes(3000)})
        print(number, flush=True)
else:
    rank, size, until = map(int, words)
    queue.place(rank, size)
    state = Path(directory, f"cursor{rank}")
    if state.exists():
        queue.load_state_dict({"queue": 1, "cursor": int(state.read_text()), "step": 0})
    while queue.cursor < until:
        items = next(iter(queue.batches()))
        print(queue.cursor, *(item["number"] for item in items), flush=True)
        queue.commit()
        state.with_suffix(".new").write_text(str(queue.cursor))
        state.with_suffix(".new").replace(state)
