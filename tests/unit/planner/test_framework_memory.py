"""If these fail: other frameworks' memory is predicted wrongly, or what ran out of it is called possible."""

from dataclasses import replace
from pathlib import Path

import pytest

from myriad.comm.layout import Layout
from myriad.errors import BadInputError
from myriad.model.config import ModelConfig
from myriad.planner import PredictedMemory, TableOptions, memory_errors, read_table
from myriad.planner.memory.closed_form_memory import PeakMemory, worst_stage_memory
from myriad.planner.memory.framework_memory import FrameworkMemory
from myriad.planner.memory.rank_memory import memory_of_ranks
from myriad.planner.simulation.simulation_cache import SimulationCache
from myriad.planner.validation.memory_errors import predict_memory_of
from myriad.planner.validation.published_rows import PublishedRow
from myriad.planner.workload import FrameworkProfile, Workload
from myriad.recipes.framework import ReadyRecipes, load_framework

RECIPES = ReadyRecipes()
HEADER = "model,gpus,gpu_type,tp,pp,vpp,micro_batch,global_batch,recompute,framework,iteration_s"
GOOD = "llama3-8b,16,H100-SXM-80GB,2,1,1,1,128,none,nanotron,4.0"


def predicted(rows: list[PublishedRow]) -> list[PredictedMemory]:
    simulations = SimulationCache()
    return [predict_memory_of(row, row.works[0], simulations) for row in rows]


def read(folder: Path, *lines: str, header: str = HEADER) -> tuple[PublishedRow, ...]:
    path = folder / "mine.csv"
    path.write_text("\n".join((header, *lines)) + "\n")
    table = read_table(str(path), RECIPES)
    return (*table.rows, *table.memory_rows)


def test_the_sweep_is_within_the_aims() -> None:
    (errors,) = memory_errors(predicted(list(read_table("nanotron_sweep.csv", RECIPES).rows[::10])))
    assert errors.allocated_median is not None and errors.allocated_median <= 0.05
    assert errors.reserved_median is not None and errors.reserved_median <= 0.10
    assert errors.fits_right_ratio >= 0.95


@pytest.mark.parametrize("framework", ["zero-bubble", "megatron-core-sync"])
def test_published_peaks_are_within_the_aims(framework: str) -> None:
    table = read_table("iterations.csv", RECIPES, TableOptions(skip_bad=True))
    rows = [row for row in table.rows if row.framework == framework and row.memory is not None]
    assert len(rows) >= 20
    (errors,) = memory_errors(predicted(rows[::3]))
    assert errors.allocated_median is not None and errors.allocated_median <= 0.05
    assert errors.fits_right_ratio == 1.0


def test_a_row_that_ran_out_of_memory_has_no_time_and_does_not_fit(tmp_path: Path) -> None:
    large = GOOD.replace(",1,1,1,128", ",1,1,16,128").replace(",4.0", ",")
    rows = read(tmp_path, f"{GOOD},no", f"{large},yes", header=f"{HEADER},out_of_memory")
    small, ran_out = predicted(list(rows))
    assert small.fits and small.fits_as_measured and not small.measured.ran_out
    assert ran_out.measured.ran_out and not ran_out.fits and ran_out.fits_as_measured
    (errors,) = memory_errors([small, ran_out])
    assert (errors.num_out_of_memory, errors.fits_right_ratio, errors.allocated_median) == (1, 1.0, None)


def test_sizes_have_units_and_are_checked(tmp_path: Path) -> None:
    header = f"{HEADER},allocated_bytes,reserved_bytes,notes"
    (row,) = read(tmp_path, f"{GOOD},12 GiB,15000000000,", header=header)
    assert row.memory is not None
    assert (row.memory.allocated_bytes, row.memory.reserved_bytes) == (12 * 2**30, 15e9)
    (row,) = read(tmp_path, f"{GOOD},,,real memory 66.55 GiB; and more", header=header)
    assert row.memory is not None and row.memory.allocated_bytes == int(66.55 * 2**30)
    with pytest.raises(BadInputError, match="a size above 0"):
        read(tmp_path, f"{GOOD},much,,", header=header)
    with pytest.raises(BadInputError, match="yes or no"):
        read(tmp_path, f"{GOOD},perhaps", header=f"{HEADER},out_of_memory")
    with pytest.raises(BadInputError, match="at least one row with a time"):
        read(tmp_path, f"{GOOD.replace(',4.0', ',')},yes", header=f"{HEADER},out_of_memory")


@pytest.mark.parametrize("framework", ["nanotron", "zero-bubble", "megatron-core"])
@pytest.mark.parametrize("axes", [(8, 1, 1), (1, 8, 1), (2, 2, 2), (1, 1, 4)], ids=str)
def test_the_closed_form_agrees_with_the_program(
    tmp_path: Path, framework: str, axes: tuple[int, int, int]
) -> None:
    dp, tp, pp = axes
    line = f"llama3-8b,{dp * tp * pp},H100-SXM-80GB,{tp},{pp},1,2,{dp * 32},none,{framework},4.0"
    (row,) = read(tmp_path, line)
    work = replace(row.works[0], layout=row.works[0].layout.model_copy(update={"partition": "uniform"}))
    exact = max(float(one.total) for one in memory_of_ranks(work))
    closed = worst_stage_memory(
        work.model, work.profile, dp=dp, tp=tp, pp=pp, virtual_stages=1, micro_batch=2, num_micro_batches=16,
        zero=work.layout.zero, reduce_each=0, recompute=0, eager=0, zero_bubble=0, value_bytes=2,
    )  # fmt: skip
    assert float(closed.total) == pytest.approx(exact, rel=0.08)


def changed(work: Workload, **values: object) -> Workload:
    memory = replace(FrameworkMemory(), **values)  # type: ignore[arg-type]
    return replace(work, profile=replace(FrameworkProfile(), memory=memory))


def test_what_stays_in_memory_is_counted_once(tmp_path: Path) -> None:
    (row,) = read(tmp_path, GOOD)
    work = changed(row.works[0])
    (base,) = memory_of_ranks(work)
    (more,) = memory_of_ranks(changed(work, workspace_bytes=2**26))
    assert float(more.allocated - base.allocated) == 2**26
    assert float(more.reserved - base.reserved) == pytest.approx(1.05 * 2**26)
    (buffered,) = memory_of_ranks(changed(work, gradient_copy_bytes=2))
    assert float(buffered.gradients - base.gradients) == pytest.approx(float(base.gradients) / 2)
    (slack,) = memory_of_ranks(changed(work, tensor_slack=0.25))
    assert float(slack.allocated) == float(base.allocated) < float(slack.reserved) < float(slack.total)


def test_a_framework_s_memory_has_keys_of_its_own() -> None:
    assert load_framework("nanotron").profile.memory.reports == "update"
    assert load_framework("megatron-bridge").profile.memory.block_values is not None, "extends megatron-core"
    assert load_framework("myriad").profile.memory == FrameworkMemory()


def test_layouts_that_ran_are_predicted_to_fit() -> None:
    """All of them: python benchmarks/planner/memory_rows.py --fits."""
    rows = read_table("iterations.csv", RECIPES, TableOptions(skip_bad=True)).rows
    for framework in ("megatron-core", "megatron-bridge", "megatron-core-moe", "mosaicml-fsdp", "nemo-2024"):
        found = predicted([row for row in rows if row.framework == framework][::3])
        wrong = [one.row.name for one in found if not one.fits]
        assert len(wrong) <= 1, (framework, wrong)


MODEL = ModelConfig(layers=8, hidden=4096, heads=32, kv_heads=8, sequence=4096, vocabulary=32000)
LAYOUT = Layout(dp=2, tp=2, pp=2, virtual_stages=4, zero=1)


def fullest(
    model: ModelConfig = MODEL, layout: Layout = LAYOUT, batch: int = 64, **values: object
) -> PeakMemory:
    """Return the memory of the fullest rank of Megatron-Core in float8, with other values of its profile."""
    profile = replace(load_framework("megatron-core").profile, quantization="tensor")
    own = {name: values.pop(name) for name in list(values) if hasattr(profile.memory, name)}
    memory = replace(profile.memory, **own)  # type: ignore[arg-type]
    profile = replace(profile, memory=memory, **values)  # type: ignore[arg-type]
    work = Workload(model, layout, batch, profile=profile)
    return max(memory_of_ranks(work), key=lambda one: float(one.total))


def test_a_library_keeps_parameters_and_inputs_in_float8() -> None:
    own, apart = fullest(), fullest(quantized_parameters=False)
    matrices = MODEL.block_parameters * MODEL.layers / (LAYOUT.tp * LAYOUT.pp)
    assert apart.weights - own.weights == pytest.approx(2 * matrices, rel=0.01)
    assert own.activations < 0.9 * fullest(keeps_quantized_inputs=False).activations
    fours = fullest(quantization="nvfp4")
    assert fours.activations < own.activations


def test_messages_that_were_sent_are_freed() -> None:
    for batch in (64, 128):
        assert fullest(batch=batch).buffers < 0.5 * fullest(batch=batch, frees_sent=False).buffers


def test_recomputed_blocks_keep_their_input_alone() -> None:
    selective = LAYOUT.model_copy(update={"recompute": "selective"})
    none = fullest().activations
    some, most = (fullest(layout=selective, selective_blocks=share).activations for share in (0.25, 1.0))
    assert most < some < none
    assert 0.1 < (none - some) / (none - most) < 0.25, "what one block repeats is held once"


def test_of_experts_a_rank_keeps_its_own_forms_and_no_results() -> None:
    model = MODEL.model_copy(update={"experts": 16, "experts_per_token": 4, "expert_ffn": 1024})
    layout = Layout(dp=8, ep=8, etp=1, zero=1)
    apart = [fullest(model, layout, quantized_parameters=one).weights for one in (False, True)]
    assert apart[0] - apart[1] < 0.3 * 2 * model.block_parameters * model.layers
    with_results, without = (fullest(model, layout, keeps_results=one).activations for one in (True, False))
    results = model.layers * model.sequence * 4 * model.hidden * 2
    assert with_results - without == pytest.approx(results, rel=0.05)
