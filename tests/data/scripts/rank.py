"""One rank of a training that only counts: it loads, rolls back at random, commits, and notes what it committed.

    RANK=0 WORLD_SIZE=1 python rank.py DIRECTORY LENGTH UNTIL_STEP

It resumes from its own state file, or from `start.json`.
"""

import json
import os
import random
import sys
import time
from pathlib import Path

from samples import Numbers

from argosy.data import Loader, Processes

BATCH, MICRO, SEED = 24, 2, 11


def main() -> None:
    directory, length, until = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    rank = os.environ["RANK"]
    mine = directory / f"state-{rank}.json"
    loader = Loader(Numbers(length), BATCH, MICRO, seed=SEED, workers=Processes(2, tries=1000))
    for saved in (mine, directory / "start.json"):
        if saved.exists():
            loader.load_state_dict(json.loads(saved.read_text()))
            break
    with (directory / f"log-{rank}").open("a") as log:
        while loader.step < until:
            for _ in range(random.choice([0, 0, 1, 2])):
                for batch, _ in zip(loader.batches(), range(random.randrange(6)), strict=False):
                    batch[1][...] = 0
            ids = [index for batch in loader.batches() for index in batch[0].tolist()]
            print(json.dumps([loader.step, ids]), file=log, flush=True)
            loader.commit()
            draft = mine.with_suffix(".draft")
            draft.write_text(json.dumps(loader.state_dict()))
            draft.rename(mine)
            time.sleep(0.02)
    loader.close()


if __name__ == "__main__":
    main()
