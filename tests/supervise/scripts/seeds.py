"""Draw from every generator that nobody seeded; one line per rank."""

import os
import random
import secrets

import numpy as np
import torch

draws = [random.random(), np.random.random(), torch.rand(1).item(), np.random.default_rng().random()]
print("drawn", os.environ.get("RANK"), *draws, secrets.token_hex(4), torch.get_num_threads())
torch.manual_seed(1)
np.random.seed(1)
random.seed(1)
print("seeded", os.environ.get("RANK"), random.random(), np.random.random(), torch.rand(1).item())
