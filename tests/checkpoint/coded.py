"""An optimizer with an 8-bit moment in a tensor that consists of codes, a scale per 64 cells, and a book."""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

SIZE = 64


class Coded(Tensor):
    """Has no memory of its own."""

    codes: Tensor
    scale: Tensor
    qmap: Tensor

    @staticmethod
    def __new__(cls, codes: Tensor, scale: Tensor, qmap: Tensor, dtype: torch.dtype) -> "Coded":
        return Tensor._make_wrapper_subclass(cls, codes.shape, dtype=dtype, device=codes.device)

    def __init__(self, codes: Tensor, scale: Tensor, qmap: Tensor, dtype: torch.dtype) -> None:
        self.codes, self.scale, self.qmap = codes, scale, qmap

    def __tensor_flatten__(self) -> tuple[list[str], list[Any]]:
        return ["codes", "scale", "qmap"], [self.dtype]

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], context: list[Any], *_: object) -> "Coded":
        return cls(inner["codes"], inner["scale"], inner["qmap"], *context)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].codes, args[0].scale, args[0].qmap, args[0].dtype)
        if func is torch.ops.aten.view.default:
            return cls(args[0].codes.view(args[1]), args[0].scale, args[0].qmap, args[0].dtype)
        return NotImplemented

    def dequantize(self) -> Tensor:
        return (self.qmap[self.codes.long()].view(-1, SIZE) * self.scale[:, None]).view(self.shape)


def coded(values: Tensor) -> Coded:
    blocks = values.reshape(-1, SIZE)
    scale = blocks.abs().amax(1)
    codes = (blocks / scale[:, None] * 127).round() + 128
    book = torch.arange(-128, 128) / 127
    return Coded(codes.to(torch.uint8).view(values.shape), scale, book, torch.float32)


class Coder(torch.optim.Optimizer):
    """Its moment is the last gradient."""

    def __init__(self, parameters: object) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure: object = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                gradient = parameter.grad
                if not isinstance(gradient, DTensor):
                    self.state[parameter] = {"moment": coded(gradient)}
                    continue
                part = coded(gradient.to_local())
                mesh, cuts, size, stride = gradient.device_mesh, gradient.placements, gradient.shape, gradient.stride()
                moment = DTensor.from_local(part, mesh, cuts, run_check=False, shape=size, stride=stride)
                self.state[parameter] = {"moment": moment}
