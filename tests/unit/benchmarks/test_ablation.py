"""What breaks for the user: an ablation that compares other things than it says."""

from xml.etree import ElementTree

import pytest
import torch

from ablation import (
    LAMB,
    OPERATORS,
    ROWS,
    SLICES,
    TURNS,
    Cell,
    chart,
    columns_of,
    job_of,
    loss_differences,
    setup_of,
    table,
)
from myriad.job.job_changes import JobChange, changes_between
from myriad.model.boundary import Boundary
from myriad.model.config import ModelConfig
from myriad.model.definition import Context
from myriad.model.gpt import GPT
from plain_operators import plain_operators

COLUMNS = columns_of("200mbit", "1gbit")
SMALL = {"layers": 2, "hidden": 32, "heads": 4, "sequence": 32, "vocabulary": 50, "vocabulary_multiple": 1}


@pytest.mark.parametrize("column", COLUMNS, ids=lambda column: column.name)
def test_every_row_is_a_job_and_keeps_what_the_rows_above_switched_on(column):
    before = {}
    for row in column.rows:
        job = job_of(column, row)
        overlaps = {name for name, value in job.overlap.model_dump().items() if value is True}
        overlaps |= {"tensor"} if job.overlap.tensor else set()
        now = {"overlaps": overlaps, "block": job.model.block, "window": job.model.window}
        assert before.get("overlaps", set()) <= overlaps
        assert before.get("block") in (None, "serial", job.model.block)
        assert before.get("window") in (None, job.model.window)
        before = now


def test_only_the_last_row_has_more_tokens_and_another_optimizer():
    batches = [job_of(COLUMNS[0], row).train.global_batch for row in COLUMNS[0].rows]
    assert batches == [batches[0]] * (len(batches) - 1) + [3 * batches[0]]
    assert [job_of(COLUMNS[0], row).optimizer.name for row in (LAMB - 1, LAMB)] == ["adamw", "lamb"]


def test_both_ways_to_hide_tensor_parallelism_have_a_row_and_differ_in_nothing_else():
    slices, turns = (job_of(COLUMNS[1], row) for row in (SLICES, TURNS))
    assert (slices.overlap.tensor, turns.overlap.tensor) == ("slices", "turns")
    assert changes_between(slices, turns) == [JobChange("overlap.tensor", "slices", "turns")]
    assert {SLICES, TURNS} <= set(COLUMNS[1].rows)


def test_pytorchs_operators_serve_the_rows_above_operators_and_no_tensor_parallel_rank():
    plain = {
        (column.name, row)
        for column in COLUMNS
        for row in column.rows
        if setup_of(column, row).around is plain_operators
    }
    assert plain == {("dp2 pp2", row) for row in COLUMNS[0].rows if row < OPERATORS}


def train_once(config: ModelConfig) -> tuple[float, dict[str, torch.Tensor]]:
    definition, context = GPT(config, seed=1), Context(targets=torch.arange(64).view(2, 32) % 50)
    x, gradients = torch.arange(64).view(2, 32) * 7 % 50, {}
    layers = [definition.build(index, Boundary()) for index in range(len(definition.names))]
    for index, layer in enumerate(layers):
        for name, values in definition.initial(index).items():
            layer.get_parameter(name).data = values
        x = layer(x, context)
    x.backward()
    for index, layer in enumerate(layers):
        gradients |= {f"{index}.{name}": p.grad for name, p in layer.named_parameters()}
    return x.item(), gradients


@pytest.mark.parametrize("model", [{}, {"window": 8, "block": "parallel"}, {"kv_heads": 2}], ids=str)
def test_pytorchs_operators_compute_what_myriads_do(model):
    config = ModelConfig(**(SMALL | {"tied": False} | model))
    loss, gradients = train_once(config)
    with plain_operators():
        plain_loss, plain_gradients = train_once(config)
    assert plain_loss == pytest.approx(loss, rel=1e-5)
    for name, gradient in gradients.items():
        torch.testing.assert_close(plain_gradients[name], gradient, rtol=1e-4, atol=1e-4)


def test_table_and_chart_show_every_cell_beside_the_papers_figure():
    cells = [
        Cell(column.name, row, 2048, 1e11, [1.0, 1.2, 1.1], loss=2.0, mfu=0.4)
        for column in COLUMNS
        for row in column.rows
    ]
    assert table(COLUMNS, cells).count("1100 (1000 to 1200) | 40.0") == len(cells)
    assert all(f"| {row.paper_mfu or ''} |" in table(COLUMNS, cells) for row in ROWS)
    assert chart(COLUMNS, cells).count("40.0 %") == len(cells)
    assert ElementTree.fromstring(chart(COLUMNS, cells)) is not None
    assert loss_differences(COLUMNS, cells).count("0e+00") == len(COLUMNS)
