"""A Ray cluster of as many raylets as asked for, on this machine, until standard input ends."""

import sys

from ray.cluster_utils import Cluster

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
for _ in range(int(sys.argv[1]) - 1):
    cluster.add_node(num_cpus=1)
print("address", cluster.address, flush=True)
sys.stdin.read()
cluster.shutdown()
