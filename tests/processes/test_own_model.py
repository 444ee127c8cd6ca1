"""A model that is not ours, in any layout. If these break, `examples/own_model.py` promises too much."""

import functools
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from ranks import reuse_ranks, run_ranks
from torch import nn

import myriad
from myriad.comm.layout import Layout
from myriad.errors import BadInputError
from myriad.optim.config import OptimizerConfig
from myriad.parallel.batch import Batch
from myriad.parallel.custom import Layer, LayerList
from myriad.train.fit import fit

pytestmark = pytest.mark.usefixtures("dynamo")

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_model.py"
OPTIMIZER = OptimizerConfig(learning_rate=3e-3, warmup_steps=10, weight_decay=0.01)


@functools.cache
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("own_model", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def losses(layout: Layout, model: LayerList | None = None, **keys: Any) -> list[float]:
    """One rank's side; rank 0 gives the losses."""
    keys = {"steps": 3, "global_batch": 64} | keys
    found = fit(model or example().make_model(), example().batch, layout, OPTIMIZER, **keys)
    return [result.loss for _, result in found]


@functools.cache
def one_process() -> list[float]:
    return reuse_ranks(1, losses, Layout(micro_batch=8))[0]


def with_a_bare_stage() -> LayerList:
    """Three layers, the middle one without parameters."""
    layers = [
        Layer("in", lambda: nn.Linear(16, 32)),
        Layer("bend", nn.GELU),
        Layer("out", lambda: nn.Unflatten(1, (16, 2))),
    ]
    return LayerList(layers, _logged_loss)


def _logged_loss(y: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Log the loss, on the last stage; and once a value that is no number."""
    loss = y.square().sum()
    myriad.log({"of its micro-batch": loss})
    if int(os.environ["RANK"]) + 1 == int(os.environ["WORLD_SIZE"]):
        myriad.log({"of the last rank": 2.0, "none": float("nan")})
    return loss


@pytest.mark.parametrize("name", ["adamw", "lamb"])
def test_a_rank_may_hold_layers_without_parameters(name: str) -> None:
    def train(pp: int) -> list[float]:
        layout = Layout(pp=pp, micro_batch=8, partition="manual:1,2" if pp == 3 else "uniform")
        optimizer = OPTIMIZER.model_copy(update={"name": name})
        found = fit(with_a_bare_stage(), example().batch, layout, optimizer, steps=5, global_batch=64)
        return [result.loss for _, result in found]

    assert run_ranks(3, train, 3)[0] == pytest.approx(run_ranks(1, train, 1)[0], rel=1e-5)


def test_a_value_is_logged_by_whichever_ranks_have_it() -> None:
    """Two replicas of two stages: the loss is on ranks that are not the first."""

    def train(dp: int, pp: int) -> list[dict[str, float | None]]:
        layout = Layout(dp=dp, pp=pp, micro_batch=8)
        found = fit(with_a_bare_stage(), example().batch, layout, OPTIMIZER, steps=3, global_batch=64)
        return [dict(result.user) for _, result in found]

    one, all_ranks = run_ranks(1, train, 1, 1)[0], run_ranks(4, train, 2, 2)[0]
    assert len(one) == 3
    for step, expected in zip(all_ranks, one, strict=True):
        assert step.pop("of its micro-batch") == pytest.approx(expected["of its micro-batch"], rel=1e-5)
        assert step == {"of the last rank": 2.0, "none": None}


def test_the_example_is_short() -> None:
    assert len(EXAMPLE.read_text().splitlines()) < 80


def test_the_example_under_torchrun_gives_the_losses_of_one_process() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    arguments = ["dp=2", "zero=2", "steps=20"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        [*command, str(EXAMPLE), *arguments], capture_output=True, text=True, timeout=240, env=environment
    )
    assert done.returncode == 0, done.stderr
    alone = run_ranks(1, functools.partial(losses, steps=20), Layout(micro_batch=8))[0]
    said = re.findall(r"step +(\d+)  loss ([0-9.]+)", done.stdout)
    assert [int(step) for step, _ in said] == [1, 20]
    for step, loss in said:
        assert float(loss) == pytest.approx(alone[int(step) - 1], rel=1e-5)


@pytest.mark.parametrize(
    "layout",
    [
        {"tp": 2, "dp": 2, "zero": 3, "micro_batch": 4},
        {"pp": 2, "schedule": "zero-bubble", "micro_batch": 8},
        {"pp": 2, "virtual_stages": 2, "micro_batch": 16, "partition": "type:Mixer"},
        {"pp": 3, "partition": "parameters", "micro_batch": 8},
        {"tp": 2, "pp": 2, "micro_batch": 8, "recompute": "full"},
    ],
    ids=str,
)
def test_every_layout_gives_the_losses_of_one_process(layout: dict[str, Any]) -> None:
    chosen = Layout(**layout)
    assert reuse_ranks(chosen.world, losses, chosen)[0] == pytest.approx(one_process(), rel=1e-5)


def test_the_example_learns() -> None:
    found = run_ranks(1, functools.partial(losses, steps=40), Layout(micro_batch=64))[0]
    assert found[-1] < 0.7 * found[0]


class Autoencoder(nn.Module):
    """Half of one: its weight is the other half's."""

    def __init__(self) -> None:
        super().__init__()
        self.code = nn.Linear(16, 16, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.code(x).tanh()


def make_tied() -> LayerList:
    layers = [Layer("first", Autoencoder), *(Layer(f"mid.{i}", lambda: nn.Linear(16, 16)) for i in range(3))]
    return LayerList(
        [*layers, Layer("last", Autoencoder)],
        lambda output, targets: (output - targets / 16).square().sum(),
        tied={"last.code.weight": "first.code.weight"},
    )


@pytest.mark.parametrize("layout", [{"pp": 2}, {"pp": 2, "dp": 2, "zero": 2}, {"virtual_stages": 3}], ids=str)
def test_weights_tied_by_name_are_one_in_every_layout(layout: dict[str, Any]) -> None:
    chosen = Layout(micro_batch=8, **layout)
    expected = run_ranks(1, losses, Layout(micro_batch=8), make_tied())[0]
    assert run_ranks(chosen.world, losses, chosen, make_tied())[0] == pytest.approx(expected, rel=1e-5)


def test_inputs_that_are_numbers_come_in_the_computing_type() -> None:
    found = run_ranks(1, functools.partial(losses, precision="bfloat16", steps=3), Layout(micro_batch=64))[0]
    assert found == pytest.approx(one_process()[:3], rel=0.02)


def explode(step: int, rows: range) -> Batch:
    made = example().batch(step, rows)
    return Batch(made.inputs * (float("nan") if step == 2 else 1), made.targets, made.samples)


def fails() -> str:
    try:
        list(fit(example().make_model(), explode, Layout(dp=2), OPTIMIZER, steps=5, global_batch=64))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def test_a_loss_that_is_not_a_number_stops_every_rank_with_step_tensor_and_rank() -> None:
    found = run_ranks(2, fails)
    assert found[0] == found[1]
    first = "first bad tensor is the loss of micro-batch 0, on rank 0"
    assert found[0] == f"RunFailedError: step 3: loss is nan; {first}"


@pytest.mark.parametrize(
    ("layout", "rows", "key"),
    [
        (Layout(reduce="each"), 64, "layout.reduce"),
        (Layout(cp=2), 64, "layout.cp"),
        (Layout(micro_batch=5), 64, "global_batch"),
        (Layout(virtual_stages=7), 64, "layout.pp x layout.virtual_stages"),
        (Layout(partition="evenly"), 64, "layout.partition"),
        (Layout(recompute="selective"), 64, "layout.recompute"),
        (Layout(dp=2), 64, "WORLD_SIZE"),
    ],
    ids=str,
)
def test_a_layout_that_cannot_be_is_refused(
    layout: Layout, rows: int, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(BadInputError) as caught:
        losses(layout, global_batch=rows, steps=1)
    assert caught.value.key == key
