"""A sibling."""


class Cargo:
    def drop(self) -> None:
        raise RuntimeError("overboard")
