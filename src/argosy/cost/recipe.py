"""How a step is spread over ranks: the recipe, its text form, and the checks that need no model."""

from dataclasses import dataclass, fields

from argosy.core import ConfigError

RECOMPUTE = ("none", "full")
DTYPES = ("model", "bf16")


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """The degrees of parallelism, and what each rank computes at once."""

    dp: int = 1
    """Copies of the model; their gradients are averaged by an all-reduce."""
    fsdp: int = 1
    """Ranks over which the parameters, gradients and optimizer state of one copy are sharded."""
    tp: int = 1
    """Ranks that share each matrix product."""
    pp: int = 1
    """Pipeline stages."""
    chunks: int = 1
    """Groups of layers per stage; more than one interleaves the pipeline."""
    micro: int = 1
    """Rows per rank that go through the model at once."""
    accumulate: int = 1
    """Micro-batches per step."""
    recompute: str = "none"
    dtype: str = "model"
    """What the forward and backward pass compute in: what the model has, or bf16."""
    reshard: bool = True
    """Whether gathered parameters are dropped after the forward pass and gathered again for the backward pass."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type in (int, "int") and value < 1:
                raise ConfigError(f"{field.name} must be at least 1: {value}")
        for name, value, known in (("recompute", self.recompute, RECOMPUTE), ("dtype", self.dtype, DTYPES)):
            if value not in known:
                raise ConfigError(f"{name} is not one of {', '.join(known)}: {value}")
        if self.chunks > 1 and self.pp == 1:
            raise ConfigError(f"chunks needs a pipeline: chunks={self.chunks} with pp=1")
        if self.chunks > 1 and self.accumulate % self.pp:
            raise ConfigError(
                f"an interleaved pipeline needs accumulate to be a multiple of pp: {self.accumulate} of {self.pp}"
            )

    @property
    def world(self) -> int:
        """The number of ranks."""
        return self.dp * self.fsdp * self.tp * self.pp

    @property
    def rows(self) -> int:
        """Rows of the batch that one step consumes, over all ranks."""
        return self.dp * self.fsdp * self.micro * self.accumulate

    def __str__(self) -> str:
        given = [f for f in fields(self) if getattr(self, f.name) != f.default]
        return " ".join(f"{f.name}={_text(getattr(self, f.name))}" for f in given) or "one rank"

    @staticmethod
    def parse(text: str) -> "Recipe":
        """Read `fsdp=8 tp=2 micro=4 recompute=full`; commas separate too.

        Raises:
            ConfigError: an unknown name, or a value that is not of its kind.
        """
        known = {field.name: field for field in fields(Recipe)}
        values: dict[str, int | str | bool] = {}
        for word in text.replace(",", " ").split():
            name, equals, value = word.partition("=")
            if not equals or name not in known:
                raise ConfigError(f"not a part of a recipe: {word}", hint=f"NAME=VALUE with one of {', '.join(known)}")
            values[name] = _value(name, value, known[name].default)
        return Recipe(**values)  # pyright: ignore[reportArgumentType]


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _value(name: str, text: str, default: object) -> int | str | bool:
    if isinstance(default, bool):
        if text not in ("true", "false"):
            raise ConfigError(f"{name} is neither true nor false: {text}")
        return text == "true"
    if isinstance(default, int):
        if not text.isdecimal():
            raise ConfigError(f"{name} is not a whole number: {text}")
        return int(text)
    return text
