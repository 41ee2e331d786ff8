"""hello.py for Monarch: four actors import torch, the client prints what the first one says."""

from monarch.actor import Actor, endpoint, this_host

TEXT = "before"


class Worker(Actor):
    @endpoint
    async def hello(self) -> str:
        import torch

        assert torch.ones(1).item() == 1.0
        return f"line {TEXT}"


def main() -> None:
    procs = this_host().spawn_procs(per_host={"procs": 4})
    said = procs.spawn("workers", Worker).hello.call().get()
    print(next(text for _, text in said.items()), flush=True)
    procs.stop().get()


if __name__ == "__main__":
    main()
