"""Ray: a local cluster, N actors, one call to all, gone.   ray_launch.py N {plain|torch}"""

import sys

import ray


class Worker:
    def __init__(self, what: str) -> None:
        if what == "torch":
            import torch

            assert torch.ones(1).item() == 1.0

    def ping(self) -> int:
        return 1


def main() -> None:
    ray.init(num_cpus=512, include_dashboard=False, _node_ip_address="127.0.0.1", log_to_driver=False)
    actor = ray.remote(num_cpus=1)(Worker)
    workers = [actor.remote(sys.argv[2]) for _ in range(int(sys.argv[1]))]
    ray.get([worker.ping.remote() for worker in workers])
    ray.shutdown()


if __name__ == "__main__":
    main()
