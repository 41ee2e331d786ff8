"""Read and write the model of gpt.py as a checkpoint of transformers: Llama, or Mixtral if it has experts.

    model = load_hf("path/to/Llama")              # on every rank, before it is parallelised
    weights = weights_of(model)                   # on every rank, after training
    if rank == 0:
        save_hf("mine", config, weights)          # transformers: AutoModelForCausalLM.from_pretrained("mine")

Needs `pip install safetensors`.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path

import torch
from gpt import GPT, Config
from safetensors.torch import load_file, save_file
from torch import Tensor

KNOWN = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "rope_scaling": None, "sliding_window": None}
"""Settings of transformers' models that this model supports with one value only."""
EXPERTS = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}


def hf_names(name: str, config: Config) -> list[str]:
    """The tensors of Llama or Mixtral that hold our weight `name`: one for each expert, else one."""
    if name == "lm_head.weight":
        return ["model.embed_tokens.weight" if config.tie_word_embeddings else name]
    path, _, kind = f"model.{name}".partition(".mlp.experts.")
    if not kind:
        return [path.replace(".mlp.router.", ".block_sparse_moe.gate.")]
    return [f"{path}.block_sparse_moe.experts.{e}.{EXPERTS[kind]}.weight" for e in range(config.num_local_experts)]


def load_hf(directory: str | Path) -> GPT:
    """The model in a directory of transformers (config.json and *.safetensors), in float32.

    Raises:
        ValueError: its config.json asks for what this model does not do.
    """
    given = json.loads(Path(directory, "config.json").read_text())
    rope = given.pop("rope_parameters", None) or {}  # where transformers 5 keeps theta; version 4 has it outside
    given |= {"rope_theta": rope["rope_theta"]} if "rope_theta" in rope else {}
    config = Config(**{field.name: given[field.name] for field in fields(Config) if field.name in given})
    if given["model_type"] not in ("llama", "mixtral"):
        raise ValueError(f"{directory}/config.json: neither a llama nor a mixtral: {given['model_type']}")
    for name, value in {**KNOWN, "head_dim": config.head_dim, "rope_type": "default"}.items():
        if (found := (given | rope).get(name)) not in (None, value):
            raise ValueError(f"{directory}/config.json: this model has no other {name} than {value}: {found}")
    tensors: dict[str, Tensor] = {}
    for file in sorted(Path(directory).glob("*.safetensors")):
        tensors |= load_file(file)
    model = GPT(config)
    for name, weight in model.state_dict().items():
        parts = [tensors[each] for each in hf_names(name, config)]
        weight.copy_(torch.stack(parts) if weight.dim() == 3 else parts[0])
    return model


def save_hf(directory: str | Path, config: Config, weights: Mapping[str, Tensor]) -> None:
    """Write `weights_of` a model as a directory that transformers loads. Call it on one rank."""
    tensors: dict[str, Tensor] = {}
    for name, weight in weights.items():
        tensors |= zip(hf_names(name, config), weight if weight.dim() == 3 else [weight], strict=True)
    kind = "Mixtral" if config.num_local_experts else "Llama"
    described = {"architectures": [f"{kind}ForCausalLM"], "model_type": kind.lower(), **KNOWN, **asdict(config)}
    Path(directory).mkdir(parents=True, exist_ok=True)
    Path(directory, "config.json").write_text(json.dumps(described, indent=2))
    save_file(tensors, Path(directory, "model.safetensors"), {"format": "pt"})
