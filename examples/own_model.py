"""A model that is not ours, in a 3D layout: an MLP-Mixer that learns to sort.

    python examples/own_model.py                                              one process
    torchrun --nproc-per-node 8 examples/own_model.py dp=2 pp=2 tp=2 zero=2   eight, with the same loss

The input is 16 numbers, the output their order. Nothing below knows about parallelism but the two patterns of
`tensor_parallel`, which say how the wide matrices may be cut.
"""

import sys

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from myriad.comm.layout import Layout
from myriad.optim.config import OptimizerConfig
from myriad.parallel.batch import Batch
from myriad.parallel.custom import Layer, LayerList
from myriad.train.fit import fit
from myriad.train.worker import one_line_errors

ITEMS, WIDTH = 16, 64


class Embed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Linear(1, WIDTH)

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        return self.value(numbers[..., None])


class Mixer(nn.Module):
    """Mixes items, then channels."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.items = nn.Sequential(nn.Linear(ITEMS, 4 * ITEMS), nn.GELU(), nn.Linear(4 * ITEMS, ITEMS))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.items(self.norms[0](x).transpose(1, 2)).transpose(1, 2)
        return x + self.down(nn.functional.gelu(self.up(self.norms[1](x))))


def loss(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return cross_entropy(output.flatten(0, 1), targets.flatten(), reduction="sum")


def batch(step: int, rows: range) -> Batch:
    """Rows of the global batch of one step: the same numbers in every layout."""
    generator = torch.Generator().manual_seed(step)
    numbers = torch.rand(64, ITEMS, generator=generator)[rows.start : rows.stop]
    return Batch(numbers, numbers.argsort(1).argsort(1), torch.arange(rows.start, rows.stop))


def make_model() -> LayerList:
    layers = [Layer("embed", Embed), *(Layer(f"mix.{i}", Mixer) for i in range(4))]
    layers.append(Layer("rank", lambda: nn.Linear(WIDTH, ITEMS)))
    return LayerList(layers, loss, tensor_parallel={"mix.*.up": "column", "mix.*.down": "row"})


def main() -> None:
    keys = dict(argument.partition("=")[::2] for argument in sys.argv[1:])
    steps = int(keys.pop("steps", 200))
    layout = Layout.model_validate({"micro_batch": 8} | keys)
    optimizer = OptimizerConfig(learning_rate=3e-3, warmup_steps=10, weight_decay=0.01)
    for step, result in fit(make_model(), batch, layout, optimizer, steps=steps, global_batch=64):
        if step % 20 == 0 or step == 1:
            print(f"step {step:3d}  loss {result.loss:.6f}  gradient norm {result.grad_norm:.4f}", flush=True)


if __name__ == "__main__":
    with one_line_errors():  # a bad key is one line, not a traceback of each rank
        main()
