"""Four ranks reduce together; at the twelfth time rank 3 goes to fetch data that never comes."""

import data
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
for number in range(1, 100):
    if number == 12 and dist.get_rank() == 3:
        data.fetch()
    dist.all_reduce(torch.ones(1))
