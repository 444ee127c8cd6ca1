"""If these fail, a model is planned whose widths cost speed, and nothing says so."""

import json
from dataclasses import replace
from typing import Any

import pytest

from myriad.cli.main import main
from myriad.comm.layout import Layout
from myriad.config import parse_override
from myriad.model.config import ModelConfig
from myriad.planner import (
    Cluster,
    Costs,
    DimensionWarning,
    Workload,
    dimension_warnings,
    scale_cluster,
    simulate,
)
from myriad.recipes.cluster import load_cluster
from myriad.recipes.framework import load_framework

A100, H100 = (scale_cluster(load_cluster(name), 8) for name in ("selene-2520xa100", "eos-3072xh100"))
SMALL: dict[str, Any] = {"layers": 2, "hidden": 1024, "heads": 16, "vocabulary": 50257, "sequence": 256}
EXPERTS = {"experts": 8, "shared_experts": 3, "expert_hidden": 512, "ffn_hidden": 2048, "dense_layers": 1}
LATENT = {"kv_lora_rank": 64, "q_lora_rank": 128, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16}


def workload(
    framework: str = "torch-fsdp", *, layout: dict[str, Any] | None = None, **model: Any
) -> Workload:
    used = load_framework(framework)
    axes = {"dp": 4, "tp": 2} | (layout or {})
    return Workload(ModelConfig(**SMALL | model), Layout(**axes), 8, used.overlap, used.profile)


def found(work: Workload, cluster: Cluster = A100) -> list[DimensionWarning]:
    return dimension_warnings(work, cluster, lambda costs: simulate(costs, spans=False).seconds)


@pytest.mark.parametrize("model", [{}, EXPERTS, LATENT, {"kv_heads": 1, "head_dim": 104}])
@pytest.mark.parametrize("framework", ["torch-fsdp", "megatron-deepspeed"])
def test_widths_that_fit_have_no_warning(model: dict[str, Any], framework: str) -> None:
    assert found(workload(framework, **model)) == []


@pytest.mark.parametrize(
    ("model", "width", "size", "nearest"),
    [
        ({"hidden": 1020, "heads": 2, "head_dim": 64}, "model.hidden", 1020, 1024),
        ({"hidden": 1018, "heads": 2, "head_dim": 64}, "model.hidden", 1018, 1016),
        ({"ffn_hidden": 4104}, "model.ffn_hidden / layout.tp", 2052, 4112),
        ({**EXPERTS, "expert_hidden": 520}, "model.expert_hidden / layout.etp", 260, 528),
        (
            {**EXPERTS, "expert_hidden": 520},
            "model.shared_experts x model.expert_hidden / layout.tp",
            780,
            528,
        ),
        ({"head_dim": 65}, "model.heads x model.head_dim / layout.tp", None, None),
        ({"head_dim": 66, "heads": 4}, "model.heads x model.head_dim / layout.tp", 132, 68),
        ({"head_dim": 62, "kv_heads": 4}, "model.kv_heads x model.head_dim / layout.tp", 124, 64),
        ({**LATENT, "kv_lora_rank": 60}, "model.kv_lora_rank", 60, 64),
        ({**LATENT, "q_lora_rank": 130}, "model.q_lora_rank", 130, 128),
        ({"vocabulary_multiple": 1, "vocabulary": 50258}, "padded model.vocabulary / layout.tp", 25129, 16),
    ],
)
def test_a_width_that_no_tensor_core_likes_is_named_with_the_nearest(
    model: dict[str, Any], width: str, size: int | None, nearest: int | None
) -> None:
    by_width = {one.width: one for one in found(workload(**model))}
    if size is None:
        assert width not in by_width
        return
    one = by_width[width]
    assert (one.size, one.multiple, one.nearest, one.seconds) == (size, 8, nearest, None)
    assert str(size) in one.line and f"{one.key} = {nearest}" in one.line and "\n" not in one.line
    better = model | {one.key.removeprefix("model."): nearest}
    assert width not in {other.width for other in found(workload(**better))}


def test_a_format_of_fewer_bytes_asks_for_larger_multiples() -> None:
    work = workload(ffn_hidden=1040)
    assert found(work, H100) == []
    float8 = replace(work, profile=replace(work.profile, quantization="blocks"))
    (one,) = found(float8, H100)
    assert (one.size, one.multiple, one.nearest) == (520, 16, 1056) and "cuBLASLt" in one.line
    assert found(float8, A100) == []  # It has no float8, and computes in bfloat16.


def test_heads_are_warned_of_where_their_scores_leave_tensor_cores_and_with_what_it_costs() -> None:
    work = workload("megatron-deepspeed", head_dim=100)
    (one,) = found(work)
    assert (one.width, one.size, one.multiple, one.nearest) == ("model.head_dim", 100, 8, 104)
    chip = A100.accelerator.model_copy(update={"unaligned_flops_per_second": None})
    aligned = A100.model_copy(update={"accelerator": chip})
    times = [simulate(Costs(work, cluster), spans=False).seconds for cluster in (A100, aligned)]
    assert one.seconds == pytest.approx(times[0] - times[1])
    assert one.seconds is not None and one.seconds > 0
    assert f"{one.seconds / times[0]:.1%} of the predicted iteration" in one.line
    (unknown,) = found(work, H100)
    assert unknown.seconds is None and "the prediction omits it" in unknown.line
    assert found(workload("torch-fsdp", head_dim=100)) == []  # Its kernel pads a head.


def test_cores_and_32_bits_have_no_such_widths() -> None:
    work = workload("megatron-deepspeed", head_dim=100, ffn_hidden=1030)
    assert found(work) and found(replace(work, value_bytes=4)) == []
    assert found(work, load_cluster("laptop")) == []


@pytest.mark.parametrize(
    "command",
    [
        ("simulate", "gpt2-124m", "--cluster", "one-node-8xh100"),
        ("plan", "gpt2-124m", "--cluster", "one-node-8xh100", "--gpus", "1", "--top", "1"),
        ("plan", "gpt2-124m", "--cluster", "one-node-8xh100", "--days", "100"),
    ],
)
def test_commands_print_a_line_for_each(command: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    changed = (*command, "--model.ffn_hidden", "3076", "--train.precision", "bfloat16")
    for more in ((), ("--json",)):
        with pytest.raises(SystemExit) as ended:
            main([*changed, *more])
        assert not ended.value.code
        printed = capsys.readouterr().out
        if more:
            (one,) = json.loads(printed)["warnings"]
            assert parse_override(one["line"].rpartition("nearest: ")[2].replace(" ", "")) == (
                one["key"],
                3080,
            )
        else:
            (line,) = (line for line in printed.splitlines() if line.startswith("warning: "))
            assert "model.ffn_hidden / layout.tp = 3076" in line
