"""Who puts numbers into a queue, or trains on them; run by test_queued.py.

queued.py DIRECTORY put FIRST COUNT | queued.py DIRECTORY train STEPS [RANK:STEP, who dies there once, before the vote]
"""

import os
import signal
import sys
from pathlib import Path

directory, role, *words = sys.argv[1:]
BATCH = 6

if role == "put":
    from argosy.data import Queue

    queue = Queue(Path(directory, "queue"), BATCH, capacity=BATCH, patience_s=600.0)
    for number in range(int(words[0]), int(words[0]) + int(words[1])):
        queue.put(number)
        assert len(queue) <= BATCH + 2, "two others may have put at the same moment"
else:
    import kinds
    import torch

    import argosy
    from argosy.data import Queue

    run = argosy.Run(directory, seed=1, save_every=4)
    model = kinds.wrapped(run, torch.nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    run.track(model=model, optimizer=optimizer)
    queue = Queue(Path(directory, "queue"), BATCH, capacity=BATCH, patience_s=600.0)
    shot = Path(directory, "shot")
    for step in run.steps(until=int(words[0])):
        with step:
            items = step.batch(queue)
            if not step.rehearsal and words[1:] == [f"{run.rank}:{step.number}"] and not shot.exists():
                shot.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            model(torch.tensor(items, dtype=torch.float32)[:, None]).mean().backward()
            optimizer.step()
        if step.committed:
            with open(Path(directory, f"items.{run.rank}"), "a") as file:
                file.write(f"{step.number} {' '.join(map(str, items))}\n")
