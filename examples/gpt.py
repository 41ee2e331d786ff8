"""A Llama-like decoder in plain PyTorch, parallelised by torch's own tools. It does not import Argosy.

RMSNorm, rotary positions, grouped-query attention, SwiGLU, tied or untied embeddings. With `num_local_experts` each
MLP is a mixture of experts as in Mixtral: softmax over the chosen experts, no dropped tokens, no balancing loss. It
is small by default and trains on a CPU in seconds. Build it on every rank from one seed, or load a checkpoint of
transformers with `gpt_hf.load_hf`; the parameter names are the same. Then parallelise it, as `examples/parallel.py`
does:

    DistributedDataParallel(model)   each rank has all weights and its own rows of the batch
    shard(model, mesh)               FSDP2: each rank keeps a shard of every weight
    shard_and_split(model, mesh)     FSDP2 along the first dimension of the mesh, tensor parallel along the second
    pipeline(model, mesh, ...)       consecutive layers on each rank, microbatches in 1F1B order
    spread_experts(model, mesh)      FSDP2, but each rank keeps some experts whole and the tokens travel to them
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.distributed.tensor.parallel as tp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single  # torch's differentiable one
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor


@dataclass(frozen=True)
class Config:
    """The shape of a model, in the words of transformers' config.json."""

    vocab_size: int = 256
    hidden_size: int = 64
    intermediate_size: int = 176
    num_hidden_layers: int = 2
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    max_position_embeddings: int = 64
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10_000.0
    tie_word_embeddings: bool = False
    num_local_experts: int = 0
    """None: a dense model."""
    num_experts_per_tok: int = 2

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (i, i + half) of a head's numbers by the angle of its position."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


class Attention(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        queries, keys = config.num_attention_heads * self.head_dim, config.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(config.hidden_size, queries, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, keys, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, keys, bias=False)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        # The number of heads is not asked for: under tensor parallelism each rank has some of them.
        projected = (self.q_proj(x), self.k_proj(x), self.v_proj(x))
        q, k, v = (each.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for each in projected)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(mixed.transpose(1, 2).flatten(-2))


class MLP(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Experts(nn.Module):
    """The MLPs of all experts in three tensors, so that one cut along their first dimension spreads them."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        count, wide, narrow = config.num_local_experts, config.intermediate_size, config.hidden_size
        self.gate_proj = nn.Parameter(torch.randn(count, wide, narrow) * 0.02)
        self.up_proj = nn.Parameter(torch.randn(count, wide, narrow) * 0.02)
        self.down_proj = nn.Parameter(torch.randn(count, narrow, wide) * 0.02)
        self.mesh: DeviceMesh | None = None  # the ranks over which they are spread

    def forward(self, tokens: Tensor, counts: Tensor) -> Tensor:
        """Tokens come grouped by expert, `counts` for each, and leave in the same order."""
        return self.compute(tokens, counts) if self.mesh is None else self.travel(tokens, counts, self.mesh)

    def compute(self, tokens: Tensor, counts: Tensor) -> Tensor:
        weights = (self.gate_proj, self.up_proj, self.down_proj)
        local = [each.to_local() if isinstance(each, DTensor) else each for each in weights]
        parts = zip(tokens.split(counts.tolist()), *local, strict=True)
        return torch.cat([F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down) for x, gate, up, down in parts])

    def travel(self, tokens: Tensor, counts: Tensor, mesh: DeviceMesh) -> Tensor:
        """Send each token to the rank that holds its expert, and the result back."""
        coming = torch.zeros_like(counts)
        dist.all_to_all_single(coming, counts, group=mesh.get_group())
        table = coming.unflatten(0, (mesh.size(), -1))  # how many from each rank, for each expert here
        sends, receives = counts.unflatten(0, (mesh.size(), -1)).sum(1).tolist(), table.sum(1).tolist()
        arrived = all_to_all_single(tokens, receives, sends, mesh)
        expert = torch.arange(table.shape[1], device=tokens.device).repeat(mesh.size()).repeat_interleave(coming)
        order = expert.argsort(stable=True)  # they arrive grouped by rank; experts want them grouped by expert
        done = self.compute(arrived[order], table.sum(0))
        return all_to_all_single(done[order.argsort()], sends, receives, mesh)


class MoE(nn.Module):
    """Each token goes to the few experts that the router likes best; the results are mixed by its scores."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.count, self.chosen = config.num_local_experts, config.num_experts_per_tok
        self.router = nn.Linear(config.hidden_size, self.count, bias=False)
        self.experts = Experts(config)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        scores, expert = self.router(tokens).topk(self.chosen, dim=-1)
        order = expert.flatten().argsort(stable=True)
        counts = expert.flatten().bincount(minlength=self.count)
        done = self.experts(tokens.repeat_interleave(self.chosen, dim=0)[order], counts)
        results = done[order.argsort()].unflatten(0, (-1, self.chosen))
        return (results * scores.softmax(-1).unsqueeze(-1)).sum(1).view_as(x)


class Block(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MoE(config) if config.num_local_experts else MLP(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class GPT(nn.Module):
    cos: Tensor
    sin: Tensor

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        # By name and not by position, so that a pipeline stage with the last layers calls them as the whole does.
        self.layers = nn.ModuleDict({str(index): Block(config) for index in range(config.num_hidden_layers)})
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight
        speeds = config.rope_theta ** -(torch.arange(0, config.head_dim, 2) / config.head_dim)
        angles = torch.outer(torch.arange(config.max_position_embeddings), speeds).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the next token at each place. A pipeline stage takes and gives hidden states instead."""
        x = self.embed_tokens(tokens)
        cos, sin = self.cos[: tokens.shape[1]], self.sin[: tokens.shape[1]]
        for layer in self.layers.values():
            x = layer(x, cos, sin)
        return self.lm_head(self.norm(x))


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


@torch.no_grad()
def generate(model: nn.Module, tokens: Tensor, count: int, temperature: float = 1.0) -> Tensor:
    """Append `count` sampled tokens to each row; rows may not outgrow the model's positions."""
    for _ in range(count):
        scores = model(tokens)[:, -1].float() / temperature
        tokens = torch.cat([tokens, scores.softmax(-1).multinomial(1)], dim=1)
    return tokens


# -- spread over ranks -----------------------------------------------------------------------------


def shard(model: GPT, mesh: DeviceMesh, whole: set[nn.Parameter] | None = None) -> GPT:
    """Shard all but the parameters in `whole` over a mesh of one dimension."""
    for layer in model.layers.values():
        fully_shard(layer, mesh=mesh, ignored_params=whole)
    return fully_shard(model, mesh=mesh, ignored_params=whole)


def shard_and_split(model: GPT, mesh: DeviceMesh) -> GPT:
    """Split every matrix along the mesh's second dimension, then shard what each rank has along the first.

    Between the matrices the sequence is split instead, so its length must be a multiple of that dimension.
    """
    if model.config.num_local_experts:
        raise ValueError("a mixture of experts is not split here: use spread_experts")
    data, tensor = (mesh[name] for name in mesh.mesh_dim_names or ())
    columns, rows, norm = tp.ColwiseParallel(), tp.RowwiseParallel(output_layouts=Shard(1)), tp.SequenceParallel()
    plan: dict[str, tp.ParallelStyle] = {
        "embed_tokens": tp.RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "layers.*.input_layernorm": norm,
        "layers.*.self_attn": tp.PrepareModuleInput(
            input_layouts=(Shard(1), None, None), desired_input_layouts=(Replicate(), None, None)
        ),
        "layers.*.self_attn.[qkv]_proj": columns,
        "layers.*.self_attn.o_proj": rows,
        "layers.*.post_attention_layernorm": norm,
        "layers.*.mlp": tp.PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        "layers.*.mlp.gate_proj": columns,
        "layers.*.mlp.up_proj": columns,
        "layers.*.mlp.down_proj": rows,
        "norm": norm,
        "lm_head": tp.ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    tp.parallelize_module(model, tensor, plan)
    if model.config.tie_word_embeddings:
        model.lm_head.weight = model.embed_tokens.weight  # split alike, but by now two tensors
    return shard(model, data)


def pipeline(model: GPT, mesh: DeviceMesh, *, rows: int, microbatches: int) -> tuple[GPT, Schedule1F1B]:
    """Cut the model into one stage per rank; returns this rank's stage (what it trains) and the schedule.

    `schedule.step(x)` on the first rank, `schedule.step(target=y, losses=[])` on the last, `schedule.step()` between;
    `rows` are those of x, each as long as the model has positions. It leaves the gradients of the mean loss.
    """
    config, index, count = model.config, mesh.get_local_rank(), mesh.size()
    if config.tie_word_embeddings or config.num_hidden_layers < count:
        raise ValueError(f"{count} stages need as many layers, and embeddings that are not tied: {config}")
    bounds = [config.num_hidden_layers * stage // count for stage in range(count + 1)]
    for number in {*range(config.num_hidden_layers)} - {*range(bounds[index], bounds[index + 1])}:
        del model.layers[str(number)]
    if index > 0:
        model.embed_tokens = nn.Identity()
    if index < count - 1:
        model.norm = model.lm_head = nn.Identity()
    # With the shapes said here, stages need not infer them from each other at the first step.
    tokens = torch.empty(rows // microbatches, config.max_position_embeddings, dtype=torch.long, device="meta")
    hidden = torch.empty(*tokens.shape, config.hidden_size, device="meta", requires_grad=True)
    logits = torch.empty(*tokens.shape, config.vocab_size, device="meta", requires_grad=True)
    stage = PipelineStage(
        model,
        index,
        count,
        model.cos.device,
        input_args=hidden if index else tokens,
        output_args=hidden if index < count - 1 else logits,
        group=mesh.get_group(),
    )
    return model, Schedule1F1B(stage, microbatches, loss_fn=loss_of)


def spread_experts(model: GPT, mesh: DeviceMesh) -> GPT:
    """Give each rank its experts of every layer, and shard all else. Their number is a multiple of the ranks'."""
    if not model.config.num_local_experts or model.config.num_local_experts % mesh.size():
        raise ValueError(f"cannot spread {model.config.num_local_experts} experts over {mesh.size()} ranks")
    spread: set[nn.Parameter] = set()
    for experts in [module for module in model.modules() if isinstance(module, Experts)]:
        experts.mesh = mesh
        for name, weight in list(experts.named_parameters()):
            part = nn.Parameter(distribute_tensor(weight.detach(), mesh, [Shard(0)]))
            # An expert sees the tokens of all ranks and sums their gradients; elsewhere ranks' means are averaged.
            part.register_hook(lambda gradient: gradient / mesh.size())
            experts.register_parameter(name, part)
            spread.add(part)
    return shard(model, mesh, whole=spread)


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """All weights, whole and under the names of `GPT`, however the model is spread: call it on every rank.

    A pipeline stage gives its own; together the stages' are the whole.
    """
    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
