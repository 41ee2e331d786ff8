"""Print what the launcher says to a rank, as one line of JSON in a file of the directory that is given."""

import json
import os
import sys

NAMES = (
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
    *("GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS"),
    *("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "OMP_NUM_THREADS", "TORCH_NCCL_ASYNC_ERROR_HANDLING"),
)
with open(f"{sys.argv[1]}/{os.environ['RANK']}.json", "w") as file:
    json.dump({name: os.environ.get(name) for name in NAMES}, file)
