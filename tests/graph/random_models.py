"""Small models drawn at random: tied, frozen, shared, with dropout, odd sizes and experts."""

import random
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from argosy.cost import Recipe
from argosy.graph import Training

ACTIVATIONS: list[Callable[[Tensor], Tensor]] = [F.gelu, torch.tanh, F.silu, F.softplus]


class Feed(nn.Module):
    def __init__(self, width: int, draw: random.Random) -> None:
        super().__init__()
        inner = draw.randint(1, 9)
        self.fc1, self.fc2 = nn.Linear(width, inner, bias=draw.random() < 0.5), nn.Linear(inner, width)
        self.act = draw.choice(ACTIVATIONS)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.fc2(self.act(self.fc1(x)))


class Experts(nn.Module):
    """Every expert sees every token, weighted by a softmax over the best two: no course depends on values."""

    def __init__(self, width: int, draw: random.Random) -> None:
        super().__init__()
        self.gate = nn.Linear(width, 3, bias=False)
        self.experts = nn.ModuleList(Feed(width, draw) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        score = self.gate(x)
        best, _ = score.topk(2, dim=-1)
        weight = score.masked_fill(score < best[..., 1:], float("-inf")).softmax(-1)
        return sum(weight[..., i : i + 1] * each(x) for i, each in enumerate(self.experts))  # pyright: ignore


class RoutedExperts(Experts):
    """Each expert sees the tokens that chose it: how many depends on values, so that capture must refuse."""

    def forward(self, x: Tensor) -> Tensor:
        choice = self.gate(x).argmax(-1)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            rows = (choice == index).nonzero(as_tuple=True)
            out = out.index_put(rows, expert(x[rows]))
        return out


class Dropped(nn.Module):
    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.rate, training=True)


class RandomModel(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = random.Random(seed)
        self.vocab, width = draw.randint(3, 13), draw.randint(2, 7)
        self.embedding = nn.Embedding(self.vocab, width)
        kinds = draw.choices(["feed", "experts", "norm", "drop", "shared", "routed"], [5, 2, 3, 1, 2, 0.5], k=4)
        shared = Feed(width, draw)
        made = {"feed": Feed, "experts": Experts, "routed": RoutedExperts}
        self.kinds = kinds
        self.layers = nn.ModuleList(
            made[kind](width, draw)
            if kind in made
            else nn.LayerNorm(width)
            if kind == "norm"
            else Dropped(0.3)
            if kind == "drop"
            else shared
            for kind in kinds
        )
        self.head = nn.Linear(width, self.vocab, bias=draw.random() < 0.3)
        self.scale = nn.Parameter(torch.tensor(1.0 + draw.random()))
        if draw.random() < 0.4:
            self.head.weight = self.embedding.weight
        for parameter in self.layers.parameters():
            if draw.random() < 0.15:
                parameter.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x) * self.scale


def random_case(seed: int) -> tuple[Training, RandomModel, Recipe]:
    """A model in fp64, its training, and a recipe; dropout only on one rank, where its random numbers are eager's."""
    torch.manual_seed(seed)
    model = RandomModel(seed).double()
    draw = random.Random(seed + 1)

    def batch(rows: int) -> tuple[Tensor, Tensor]:
        return torch.randint(model.vocab, (rows, 4)), torch.randint(model.vocab, (rows, 4))

    recipe = Recipe.parse(draw.choice(["", "fsdp=2", "fsdp=3", "dp=2", "dp=2 fsdp=2", "fsdp=4 recompute=full"]))
    if "drop" in model.kinds:
        recipe = Recipe()
    return Training(lambda: model, batch, loss), model, recipe


def loss(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
