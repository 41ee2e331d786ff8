"""Small models for the tests of the graph room."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from argosy.graph import Training


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head = width // heads
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.o_proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (-1, self.head)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        return self.o_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.fc1, self.fc2 = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))


class Tiny(nn.Module):
    """A decoder of few numbers; with `tied`, the head is the embedding."""

    def __init__(self, *, vocab: int = 27, width: int = 12, layers: int = 2, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(Block(width, 2) for _ in range(layers))
        self.head = nn.Linear(width, vocab, bias=False)
        self.register_buffer("scale", torch.full((width,), 1.5))
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) * self.scale
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def batch(rows: int, vocab: int = 27, length: int = 6) -> tuple[Tensor, Tensor]:
    return torch.randint(vocab, (rows, length)), torch.randint(vocab, (rows, length))


def loss(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def tiny(**options: object) -> Training:
    return Training(lambda: Tiny(**options), batch, loss, lambda p: torch.optim.AdamW(p, lr=1e-2))


def eager(training: Training, model: nn.Module, batches: list[tuple[Tensor, ...]]) -> tuple[Tensor, dict[str, Tensor]]:
    """The mean loss over all batches, and its gradients."""
    model.zero_grad()
    total = torch.stack([training.loss(model, *each) for each in batches]).mean()
    total.backward()
    return total.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
