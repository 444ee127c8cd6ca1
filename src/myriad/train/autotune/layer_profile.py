"""Measured seconds of each layer, for ``partition = "profile"``.

One layer at a time is built in full and run forward and backward on one micro-batch. Layers of one kind with
parameters of the same shapes cost the same and are measured once.
"""

import time
from typing import Any

import torch
from torch import nn

from myriad.model.boundary import Boundary
from myriad.model.definition import Context, Definition, values_of_rank
from myriad.parallel.batch import Batch

__all__ = ["parameters_per_layer", "seconds_per_layer"]

_REPEATS = 3


def parameters_per_layer(definition: Definition) -> list[float]:
    """Return the number of parameters of each layer; a tied parameter counts where it is first used."""
    found = []
    with torch.device("meta"):
        for index, prefix in enumerate(definition.names):
            layer = definition.build(index, Boundary())
            own = {f"{prefix}.{name}": float(p.numel()) for name, p in layer.named_parameters()}
            found.append(sum(size for name, size in own.items() if name not in definition.tied))
    return found


def seconds_per_layer(definition: Definition, sample: Batch, dtype: torch.dtype) -> list[float]:
    """Measure forward and backward of each layer on one micro-batch, on the sample's device."""
    known: dict[Any, float] = {}
    found = []
    x = sample.inputs
    context = Context(targets=sample.targets, samples=sample.samples)
    for index, kind in enumerate(definition.kinds):
        layer = definition.build(index, Boundary())
        for name, values in definition.initial(index).items():
            own = values_of_rank(definition, f"{definition.names[index]}.{name}", values)
            layer.get_parameter(name).data = own.to(sample.inputs.device, dtype)
        key = (kind, tuple(parameter.shape for parameter in layer.parameters()), x.shape)
        seconds, x = _time_layer(layer, x, context)
        found.append(known.setdefault(key, seconds))
    return found


def _time_layer(layer: nn.Module, x: torch.Tensor, context: Context) -> tuple[float, torch.Tensor]:
    best, out = float("inf"), x
    for _ in range(_REPEATS):
        entering = x.detach()
        entering.requires_grad_(entering.is_floating_point())
        start = time.perf_counter()
        out = layer(entering, context)
        out.backward(torch.ones_like(out))
        if out.is_cuda:
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return best, out.detach()
