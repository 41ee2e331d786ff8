"""hello.py for Ray: four actors import torch, the driver prints what the first one says."""

import ray

TEXT = "before"


class Worker:
    def hello(self) -> str:
        import torch

        assert torch.ones(1).item() == 1.0
        return f"line {TEXT}"


def main() -> None:
    ray.init(num_cpus=4, include_dashboard=False, _node_ip_address="127.0.0.1", log_to_driver=False)
    workers = [ray.remote(num_cpus=1)(Worker).remote() for _ in range(4)]
    print(ray.get([worker.hello.remote() for worker in workers])[0], flush=True)


if __name__ == "__main__":
    main()
