"""If these fail, a user's own table of iterations is read as something that it is not."""

from pathlib import Path

import pytest

from myriad.errors import BadInputError
from myriad.planner import Framework, TableOptions, framework_errors, predict_table, read_table
from myriad.planner.cost.stage_layers import stage_layers
from myriad.planner.validation.prediction_errors import predict_rows
from myriad.planner.validation.prediction_interval import framework_interval
from myriad.planner.validation.published_rows import PublishedRow
from myriad.recipes.cluster import load_cluster
from myriad.recipes.framework import ReadyRecipes, load_framework, load_frameworks
from myriad.reports.charts.validation_chart import validation_svg

RECIPES = ReadyRecipes()
HEADER = "model,gpus,gpu_type,tp,pp,micro_batch,global_batch,recompute,iteration_s,notes"
GOOD = "llama3-8b,16,H100-SXM-80GB,2,1,1,128,none,4.0,"


def rows(folder: Path, *lines: str, header: str = HEADER, **options: object) -> tuple[PublishedRow, ...]:
    path = folder / "mine.csv"
    path.write_text("\n".join((header, *lines)) + "\n")
    return read_table(str(path), RECIPES, TableOptions(**options)).rows  # type: ignore[arg-type]


def test_empty_cells_follow_from_the_rest_of_the_row(tmp_path: Path) -> None:
    (row,) = rows(tmp_path, GOOD)
    (work,) = row.works
    assert (work.layout.dp, work.layout.tp, work.layout.zero) == (8, 2, 1)
    assert (work.model.layers, work.model.hidden, work.model.vocabulary) == (32, 4096, 128256)
    assert (row.cluster.nodes, row.cluster.accelerators_per_node) == (2, 8)
    assert row.framework == "unknown"


@pytest.mark.parametrize(("billions", "shared"), [(341, 0), (352, 1)])
def test_a_shared_expert_shows_in_the_number_of_parameters(
    tmp_path: Path, billions: int, shared: int
) -> None:
    """MegaScale-MoE's tables give 352B for a model whose stated keys make 341B."""
    header = f"{HEADER},layers,hidden,ffn,heads,kv_heads,vocab,seq,params_B"
    line = f"sparse,240,H800,8,15,1,720,none,39.0,32 experts top-3,60,4096,14336,32,8,65536,8192,{billions}"
    (row,) = rows(tmp_path, line, header=header)
    assert {work.model.shared_experts for work in row.works} == {shared}


@pytest.mark.parametrize(
    ("column", "value", "seconds"),
    [
        ("iteration_s", "4.0", 4.0),
        ("tokens_per_s_per_gpu", "16384", 128 * 8192 / 16384 / 16),
    ],
)
def test_every_measure_gives_the_seconds(tmp_path: Path, column: str, value: str, seconds: float) -> None:
    (row,) = rows(tmp_path, GOOD.replace("4.0", value), header=HEADER.replace("iteration_s", column))
    assert row.seconds == pytest.approx(seconds)


def test_mfu_counts_what_its_source_counts(tmp_path: Path) -> None:
    header = HEADER.replace("iteration_s", "mfu") + ",flops"
    found = {
        count: rows(tmp_path, f"{GOOD.replace('4.0', '50')},{count}", header=header)[0].seconds
        for count in ("model", "causal", "6n")
    }
    assert found["model"] > found["causal"] > found["6n"]
    assert found["model"] - found["causal"] == pytest.approx(found["causal"] - found["6n"])
    mine = rows(tmp_path, f"{GOOD.replace('4.0', '50')},model", header=header)[0]
    assert mine.mfu(mine.seconds) == pytest.approx(0.5)


def test_a_framework_says_what_its_mfu_counts(tmp_path: Path) -> None:
    header = HEADER.replace("iteration_s", "mfu") + ",framework,flops"
    line = GOOD.replace("4.0", "50")
    own, other, said = (
        rows(tmp_path, f"{line},{last}", header=header)[0].seconds
        for last in ("megatron-core-2025,", "megatron-core,", "megatron-core,causal")
    )
    assert own == said < other


def test_notes_say_what_captured_graphs_launch(tmp_path: Path) -> None:
    notes = {
        "CUDA graphs full_iteration": (True, False),
        "CUDA graphs transformer_engine attn+moe_router": (False, True),
        "CUDA graphs of attn, moe_router": (False, True),
        "": (False, False),
    }
    for said, expected in notes.items():
        profile = rows(tmp_path, f'{GOOD}"{said}"')[0].works[0].profile
        assert (profile.cuda_graphs, profile.captures_attention) == expected
    assert rows(tmp_path, f"{GOOD}cuteDSL fused grouped MLP")[0].works[0].profile.fused_expert_mlp
    (row,) = rows(tmp_path, f"{GOOD}CUDA graphs full,none", header=f"{HEADER},cuda_graphs")
    assert not row.works[0].profile.cuda_graphs
    with pytest.raises(BadInputError, match="cuda_graphs"):
        rows(tmp_path, f"{GOOD},half", header=f"{HEADER},cuda_graphs")


@pytest.mark.parametrize("column", ["expert_overlap", "fused_experts", "out_of_memory"])
def test_a_switch_that_says_neither_yes_nor_no_is_refused(tmp_path: Path, column: str) -> None:
    with pytest.raises(BadInputError, match=rf"{column}.*yes or no"):
        rows(tmp_path, f"{GOOD},perhaps", header=f"{HEADER},{column}")
    if column == "expert_overlap":
        for said, hides in (("no", False), ("yes", True)):
            (row,) = rows(tmp_path, f"{GOOD},{said}", header=f"{HEADER},{column}")
            assert row.works[0].profile.hides_expert_comm == hides


def test_notes_fill_cells_and_a_column_wins(tmp_path: Path) -> None:
    (row,) = rows(tmp_path, f"{GOOD}FSDP FULL_SHARD (ZeRO-3)")
    assert row.works[0].layout.zero == 3
    (row,) = rows(tmp_path, f"{GOOD}ZeRO-3,2", header=f"{HEADER},zero")
    assert row.works[0].layout.zero == 2


def test_columns_of_other_names_are_mapped(tmp_path: Path) -> None:
    header = HEADER.replace("iteration_s", "step_time")
    (row,) = rows(tmp_path, GOOD, header=header, columns={"iteration_s": "step_time"})
    assert row.seconds == 4.0
    with pytest.raises(BadInputError, match="one of source, table"):
        rows(tmp_path, GOOD, header=header, columns={"seconds": "step_time"})


def test_columns_give_any_key_of_the_model(tmp_path: Path) -> None:
    header = f"{HEADER},model.head_dim,model.tied,model.window"
    (row,) = rows(tmp_path, f"{GOOD},160,true,off", header=header)
    model = row.works[0].model
    assert (model.head_width, model.tied, model.window) == (160, True, None)
    (row,) = rows(tmp_path, f"{GOOD},160,,", header=header)
    assert row.works[0].model.head_width == 160
    with pytest.raises(BadInputError, match=r"line 2.*tyed.*unknown key"):
        rows(tmp_path, f"{GOOD},,true,", header=header.replace("tied", "tyed"))


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (GOOD.replace("4.0", "nan"), "iteration_s"),
        (GOOD.replace("llama3-8b", "some-8b"), "no recipe of the model"),
        (GOOD.replace("H100-SXM-80GB", "Z9"), "gpu_type"),
        (GOOD.replace(",16,", ",17,"), "gpus"),
        (f"{GOOD}schedule dual-pipe", "schedule"),
        (GOOD.replace("128,none", "127,none"), "global_batch"),
        (GOOD.replace("4.0", ""), "column 'iteration_s' = \"\": needed, or one of"),
        (GOOD.replace("4.0", "1e-9"), 'seconds = 1e-09": at least'),
        (
            GOOD.replace(",2,1,1,128", ",3,1,1,128").replace(",16,", ",24,"),
            "column 'tp' = \"3\": a divisor of",
        ),
        (GOOD.replace("none,4.0", "sometimes,4.0"), "none, selective, full, a policy, or modules"),
        (f"{GOOD}schedule dual-pipe", '"dual-pipe": one of 1f1b'),
        (f"{GOOD}ZeRO-1 over 3", "column 'shard_group' = \"3\": a divisor of the 8 replicas"),
    ],
)
def test_a_bad_row_is_named_and_skipped_only_on_request(tmp_path: Path, line: str, said: str) -> None:
    with pytest.raises(BadInputError) as refused:
        rows(tmp_path, GOOD, line)
    assert "line 3" in str(refused.value) and said in str(refused.value)
    path = tmp_path / "mine.csv"
    table = read_table(str(path), RECIPES, TableOptions(skip_bad=True))
    assert len(table.rows) == 1 and str(table.skipped[0]) == str(refused.value)


@pytest.mark.parametrize(
    ("column", "value", "said"),
    [
        ("ep", "8", "ep = 8: 1: the model has no experts"),
        ("kv_heads", "3", "kv_heads = 3: a divisor of the 32 heads"),
        ("vpp", "0", "'vpp'"),
        ("flops", "most", "one of model, causal, 6n, hardware"),
        ("expert_dispatch", "mail", "one of DeepEP"),
        ("framework", "nowhere", "column 'framework' = \"nowhere\": a .toml file or one of"),
        ("model.hidden", "[1]", "column 'model.hidden' = \"[1]\": a whole number"),
        ("interconnect", "0 GPUs a node", "at least 1 GPU a node"),
        ("interconnect", "8x0G", "bytes_per_second = 0.0: must be at least 1"),
    ],
)
def test_a_cell_that_no_row_can_have_is_refused_even_where_it_would_not_count(
    tmp_path: Path, column: str, value: str, said: str
) -> None:
    with pytest.raises(BadInputError) as refused:
        rows(tmp_path, f'{GOOD},"{value}"', header=f"{HEADER},{column}")
    assert "line 2" in str(refused.value) and said.replace('"', "") in str(refused.value).replace('"', "")


def test_a_width_that_no_model_has_is_refused_at_once(tmp_path: Path) -> None:
    header = f"{HEADER},layers,hidden,vocab,seq"
    with pytest.raises(BadInputError, match=r"hidden = 1000000000000.: must be at most"):
        rows(tmp_path, f"{GOOD.replace('llama3-8b', 'mine')},2,1000000000000,1024,1024", header=header)


def test_columns_are_found_however_they_are_written(tmp_path: Path) -> None:
    header = HEADER.replace("tp,pp", " TP , Pp").replace("iteration_s", "Iteration_S")
    assert rows(tmp_path, GOOD, header=header)[0].works == rows(tmp_path, GOOD)[0].works
    table = read_table(str(tmp_path / "mine.csv"), RECIPES)
    assert table.is_general and not table.unread
    rows(tmp_path, f"{GOOD},1,2", header=f"{HEADER},microbatch,Seconds per step")
    assert read_table(str(tmp_path / "mine.csv"), RECIPES).unread == ("microbatch", "Seconds per step")
    quoted = HEADER.replace("notes", '"notes",") of\n2025"')
    assert rows(tmp_path, f"{GOOD},", header=quoted)[0].seconds == 4.0


def test_ranks_that_share_sequences_are_counted(tmp_path: Path) -> None:
    (row,) = rows(tmp_path, f"{GOOD.replace(',16,', ',32,')},2", header=f"{HEADER},cp")
    (alone,) = rows(tmp_path, GOOD)
    assert (row.works[0].layout.cp, row.works[0].layout.dp) == (2, alone.works[0].layout.dp)
    with pytest.raises(BadInputError, match="a divisor of the sequence"):
        rows(tmp_path, f"{GOOD.replace(',16,', ',48,')},3", header=f"{HEADER},cp")


def test_deepspeed_exchanges_positions_for_heads_unless_a_row_says_otherwise(tmp_path: Path) -> None:
    """With Ulysses every rank has all positions of some heads: at most as many ranks as a rank has heads."""
    header, line = f"{HEADER},framework,cp,ulysses", GOOD.replace(",16,", ",64,")
    for framework, said, ulysses in (("deepspeed", "", 4), ("deepspeed", "1", 1), ("megatron-core", "2", 2)):
        (row,) = rows(tmp_path, f"{line},{framework},4,{said}", header=header)
        assert (row.works[0].layout.cp, row.works[0].layout.ulysses) == (4, ulysses)
    for cp, said in ((4, "3"), (32, "32")):  # no divisor of cp; 16 heads of a rank
        with pytest.raises(BadInputError, match="a divisor of cp"):
            rows(tmp_path, f"{line},megatron-core,{cp},{said}", header=header)


def test_open_virtual_stages_divide_embedding_and_head_too_where_the_framework_counts_them(
    tmp_path: Path,
) -> None:
    """Llama 3 405B has 126 blocks on 16 pipeline ranks: one less on the first and on the last stage."""
    header = f"{HEADER},framework"
    line = "llama3-405b,8192,H100-SXM-80GB,8,16,1,2048,none,4.0,"
    (row,) = rows(tmp_path, f"{line},llama-3", header=header)
    assert {work.layout.virtual_stages for work in row.works} == {1, 2, 4, 8}
    found = [sum(0 < one < 127 for one in stage) for stage in stage_layers(row.works[0])]
    assert found == [7, *[8] * 14, 7]
    (row,) = rows(tmp_path, f"{line},unknown", header=header)
    assert {work.layout.virtual_stages for work in row.works} == {1}


def test_deepspeed_s_pipelines_have_no_virtual_stages(tmp_path: Path) -> None:
    line = "llama2-70b,64,A100-SXM-80GB,4,8,1,64,full,40.0,"
    (row,) = rows(tmp_path, f"{line},THUDM/GLM-130B@main:logs", header=f"{HEADER},source")
    assert {work.layout.virtual_stages for work in row.works} == {1}


def test_a_row_is_predicted_as_its_source_s_framework(tmp_path: Path) -> None:
    header = f"{HEADER},source"
    for source, framework in (
        ("NVIDIA/NeMo@1:docs", "megatron-core"),
        ("NVIDIA/dgxc-benchmarking@v25.05.04:deepseek_v3/pretraining/README.md", "megatron-core"),
        ("NVIDIA/dgxc-benchmarking@v25.12:qwen3/pretrain/README.md", "megatron-bridge"),
        ("AMD-AGI/Primus@1:examples/moe_package/README.md", "primus"),
        ("NVIDIA/NeMo-Framework-Launcher@23.03:README.md", "nemo-2023"),
        ("arXiv 2407.21783 (Llama 3)", "llama-3"),
        ("arXiv 2201.11990 (MT-NLG 530B)", "megatron-deepspeed-2021"),
        ("EleutherAI/gpt-neox@1:README.md", "megatron-deepspeed-2021"),
    ):
        (row,) = rows(tmp_path, f"{GOOD},{source}", header=header)
        assert row.framework == framework
    (row,) = rows(tmp_path, f"{GOOD}FSDP; GA 4,yanring/Megatron-MoE-ModelZoo@1:qwen3", header=header)
    assert row.framework == "megatron-fsdp" and row.works[0].layout.zero == 3
    bridge = "NVIDIA-NeMo/Megatron-Bridge@1:docs"
    for gpu_type, framework in (("H100", "megatron-qwen-h100"), ("B200", "megatron-bridge")):
        line = f"Qwen3_235B_a22B,16,{gpu_type},1,1,1,16,none,4.0,,{bridge}"
        (row,) = rows(tmp_path, line, header=header)
        assert row.framework == framework
    (row,) = rows(tmp_path, f"{GOOD},NVIDIA/NeMo@1:docs", header=header, framework="nanotron")
    assert row.framework == "nanotron" and row.works[0].profile == load_framework("nanotron").profile


@pytest.mark.parametrize(
    ("model", "gpus", "gpu_type", "attention"),
    [
        ("mpt-7b", 256, "H100-SXM-80GB", "flash2"),
        ("mpt-13b", 256, "H100-SXM-80GB", "flash-triton"),
        ("mpt-7b", 64, "H100-SXM-80GB", "flash-triton"),
        ("mpt-7b", 128, "A100-SXM-80GB", "flash-triton"),
    ],
)
def test_a_benchmark_of_mosaicml_has_the_attention_that_its_script_chose(
    tmp_path: Path, model: str, gpus: int, gpu_type: str, attention: str
) -> None:
    header = "model,layers,hidden,heads,vocab,seq,gpus,gpu_type,micro_batch,global_batch,iteration_s,source"
    line = f"{model},32,4096,32,50368,2048,{gpus},{gpu_type},1,1024,9,mosaicml/llm-foundry@1:README.md"
    (row,) = rows(tmp_path, line, header=header)
    assert row.works[0].profile.attention == attention


def test_runs_whose_launcher_turns_overlap_off_wait_for_each_exchange(tmp_path: Path) -> None:
    """SimuMax's B200 results: a non-overlap contract of Megatron-Core, and gradients in float32."""
    for source, waits in (("MooreThreads/SimuMax@1:docs/b200.md", True), ("NVIDIA/NeMo@1:docs", False)):
        (row,) = rows(tmp_path, f"{GOOD},{source}", header=f"{HEADER},source")
        overlap, profile = row.works[0].overlap, row.works[0].profile
        assert (overlap.tensor is None or overlap.tensor == "off") == waits
        assert (not overlap.data and not overlap.pipeline and profile.gradient_bytes == 4) == waits


@pytest.mark.parametrize(
    ("source", "table", "model", "attention"),
    [
        ("NVIDIA/NeMo@1:docs/summary.md", "NeMo 24.07 (first)", "llama3-8b", "flash2"),
        ("NVIDIA/NeMo@1:docs/summary.md", "NeMo 24.07 (first)", "GPT3-175B", "flash3"),
        ("NVIDIA/NeMo@1:docs/performance_long_sequence.md", "LLAMA3-8B (FP8) B200", "llama3-8b", "flash3"),
        ("NVIDIA/dgxc-benchmarking@v24.11.1:nemotron/README_340b.md", "Nemotron", "llama3-8b", "flash2"),
        ("NVIDIA/dgxc-benchmarking@v25.04:nemotron/README.md", "Nemotron", "llama3-8b", "flash3"),
    ],
)
def test_attention_is_that_of_a_release(
    tmp_path: Path, source: str, table: str, model: str, attention: str
) -> None:
    """NeMo's launcher turned cuDNN's attention off until August 2024, but for 175B."""
    columns = "layers,hidden,ffn,heads,vocab,seq,source,table"
    line = f"{GOOD.replace('llama3-8b', model)},32,4096,14336,32,32000,8192,{source},{table}"
    (row,) = rows(tmp_path, line, header=f"{HEADER},{columns}")
    assert row.works[0].profile.attention == attention


@pytest.mark.parametrize(
    ("folder", "dtype", "framework"),
    [
        ("tr11-176B-ml/chronicles-prequel.md", "bf16", "megatron-deepspeed-bf16"),
        ("tr11-176B-ml/chronicles-prequel.md", "bf16/fp16", "megatron-deepspeed"),
        ("tr8b-104B/chronicles.md", "fp16", "megatron-deepspeed-2021"),
    ],
)
def test_bigscience_s_runs_differ_by_year_and_type(
    tmp_path: Path, folder: str, dtype: str, framework: str
) -> None:
    line = f"{GOOD},bigscience-workshop/bigscience@1:train/{folder},{dtype}"
    (row,) = rows(tmp_path, line, header=f"{HEADER},source,dtype")
    assert row.framework == framework
    profile = row.works[0].profile
    assert profile.blocks_launches == ("2021" not in framework)
    assert profile.casts_gradients == ("bf16" in framework)


def test_two_of_four_v100_share_two_of_six_links(tmp_path: Path) -> None:
    line = f"{GOOD.replace('H100-SXM-80GB', 'V100')},4 GPUs a node"
    (row,) = rows(tmp_path, line, header=f"{HEADER},interconnect")
    assert [row.cluster.local_bytes_per_second(size, 1) for size in (2, 4)] == [50e9, 150e9]
    (other,) = rows(tmp_path, f"{GOOD.replace('H100-SXM-80GB', 'V100')},", header=f"{HEADER},interconnect")
    assert other.cluster.inside is None


@pytest.mark.parametrize(
    ("gpus", "gpu_type", "date", "ratio"),
    [
        (8, "V100", "02-20", 0.34),
        (16, "V100", "", 0.21),
        (256, "V100", "", 0.135),
        (512, "A100", "02-25", 0.34),
        (512, "A100", "heads 64; 02-24", 0.10),
    ],
)
def test_omni_path_reaches_what_was_measured_among_so_many_nodes(
    tmp_path: Path, gpus: int, gpu_type: str, date: str, ratio: float
) -> None:
    line = GOOD.replace("16,H100-SXM-80GB", f"{gpus},{gpu_type}").replace(",128,", f",{gpus},") + date
    said = "4 GPUs a node; 4x OmniPath 100G"
    (row,) = rows(tmp_path, f"{line},{said}", header=f"{HEADER},interconnect")
    assert row.cluster.ratio("network") == ratio


def test_the_accelerator_of_torchtitan_s_tables_is_the_one_that_they_describe(tmp_path: Path) -> None:
    header = f"{HEADER},source"
    for source, accelerator in (
        ("pytorch/torchtitan@1:benchmarks/llama3_h100_202412_torchtitan.md", "h100-hbm2e-96gb"),
        ("pytorch/torchtitan@1:somewhere.md", "h100-sxm-80gb"),
    ):
        (row,) = rows(tmp_path, f"{GOOD},{source}", header=header)
        assert row.cluster.name == accelerator
    (row,) = rows(tmp_path, f"{GOOD}no torch.compile,torchtitan", header=header)
    assert row.framework == "torchtitan-eager"
    (row,) = rows(tmp_path, f"{GOOD}float8 rowwise,torchtitan", header=header)
    assert row.framework == "torchtitan-rowwise"
    (row,) = rows(tmp_path, f"{GOOD},NVIDIA-NeMo/Megatron-Bridge@1,nvfp4", header=f"{header},dtype")
    assert (row.framework, row.works[0].profile.quantization) == ("megatron-bridge-nvfp4", "nvfp4")
    (row,) = rows(tmp_path, f"{GOOD}HSDP,fms-fsdp".replace(",16,", ",32,"), header=header)
    assert (row.works[0].layout.zero, row.works[0].layout.shard_group) == (3, 8)
    for stages, zero in ((1, 3), (2, 2)):
        line = GOOD.replace(",2,1,1,", f",2,{stages},1,")
        (row,) = rows(tmp_path, f"{line}FSDP2,torchtitan", header=header)
        assert row.works[0].layout.zero == zero
    assert ReadyRecipes().accelerator("H100")[0] == "h100-sxm-80gb"


@pytest.mark.parametrize(
    ("framework", "layers", "pp", "stages"),
    [
        # nanotron's sweep has the parameters of rank 0: the embedding and so many blocks.
        ("nanotron", 16, 4, (5, 5, 5, 1)),
        ("nanotron", 16, 8, (3, 2, 3, 2, 3, 2, 1, 0)),
        ("zero-bubble", 22, 8, (2, 3, 3, 3, 3, 3, 3, 2)),
        ("deepseek", 16, 8, (2, 2, 2, 3, 2, 2, 3, 0)),
        # Megatron-Core: as many blocks where stages divide them, or with embedding and head, or rounded up.
        ("megatron-core", 16, 8, (2, 2, 2, 2, 2, 2, 2, 2)),
        ("megatron-core", 94, 8, (11, 12, 12, 12, 12, 12, 12, 11)),
        ("megatron-core", 61, 8, (8, 8, 8, 8, 8, 8, 8, 5)),
        ("megatron-core", 61, 16, (*(4 for _ in range(15)), 1)),
        ("megatron-core", 61, 32, (1, *(2 for _ in range(30)), 0)),
    ],
)
def test_layers_are_divided_as_by_the_framework(
    tmp_path: Path, framework: str, layers: int, pp: int, stages: tuple[int, ...]
) -> None:
    header = "model,layers,hidden,ffn,heads,vocab,seq,gpus,gpu_type,pp,vpp,micro_batch,global_batch,"
    line = f"llama-like,{layers},2048,8192,32,131072,4096,{pp},H100-SXM-80GB,{pp},1,1,64,"
    (row,) = rows(tmp_path, f"{line}none,{framework},4.0", header=f"{header}recompute,framework,iteration_s")
    last = layers + 1
    found = [sum(0 < one < last for one in stage) for stage in stage_layers(row.works[0])]
    assert tuple(found) == stages


def test_the_published_iterations_are_read() -> None:
    table = read_table("iterations.csv", RECIPES, TableOptions(skip_bad=True))
    assert len(table.rows) + len(table.skipped) == 375
    assert len(table.skipped) <= 8, table.skipped
    assert sum(row.works[0].layout.cp > 1 for row in table.rows) == 37
    assert all(row.framework != "unknown" for row in table.rows if "DeepSeek-V3" not in row.model)


def test_the_layouts_of_qwen3_235b_are_predicted_in_the_order_that_was_measured() -> None:
    """The planner's choice among them is the fastest one: 8 stages with DeepEP before 32 with all-to-alls."""
    table = read_table("iterations.csv", RECIPES, TableOptions(skip_bad=True))
    named = [row for row in table.rows if row.framework == "megatron-core-moe" and "qwen3" in row.name]
    alone = [row for row in named if not row.works[0].profile.hides_expert_comm]
    assert len(alone) == 3
    predicted = predict_rows(sorted(alone, key=lambda row: row.seconds))
    seconds = [one.seconds for one in predicted]
    assert seconds == sorted(seconds)
    assert max(abs(one.error) for one in predicted) < 0.1


@pytest.mark.parametrize("framework", load_frameworks(), ids=lambda one: one.name)
def test_every_value_of_a_framework_has_a_source(framework: Framework) -> None:
    assert framework.name == "myriad" or framework.sources
    assert all(len(one.source) > 3 for one in framework.sources.values())


def test_a_framework_s_interval_comes_from_the_others(tmp_path: Path) -> None:
    header = f"{HEADER},framework"
    lines = [f"{GOOD.replace('4.0', str(one))},{name}" for one, name in ((2, "nanotron"), (3, "myriad"))]
    path = tmp_path / "mine.csv"
    path.write_text("\n".join((header, *lines)) + "\n")
    result = predict_table(read_table(str(path), RECIPES))
    found = {one.framework: one for one in framework_errors([result])}
    other = found["myriad"].errors[0]
    assert found["nanotron"].interval == pytest.approx(max(1 + other, 1 / (1 + other)) - 1)
    picture = validation_svg([result])
    for name in ("myriad", "nanotron"):
        assert f">{name} (1)<" in picture
        assert f"{name}: ±{framework_interval(name, has_experts=False):.0%}" in picture
        assert picture.count(f"({found[name].errors[0]:+.1%})") == 2, "a point in each half"


@pytest.mark.parametrize(
    ("said", "recipe"),
    [
        ("H20", "h20-sxm-96gb"),
        ("H200", "h200-sxm-141gb"),
        ("A100", "a100-sxm-80gb"),
        ("gb300", "gb300-279gb"),
    ],
)
def test_an_accelerator_is_not_taken_for_one_whose_name_begins_alike(said: str, recipe: str) -> None:
    assert ReadyRecipes().accelerator(said)[0] == recipe


@pytest.mark.parametrize(
    ("said", "allowed"), [("H", "h100-sxm-80gb"), ("rtx", "rtx4090"), ("H300", "a100-sxm")]
)
def test_the_start_of_several_names_is_no_accelerator(said: str, allowed: str) -> None:
    with pytest.raises(BadInputError, match=f"one of .*{allowed}"):
        ReadyRecipes().accelerator(said)


def test_a_number_of_accelerators_is_a_cluster_of_their_usual_servers() -> None:
    cluster = load_cluster("256xb200", ["links.network=800Gbps"])
    assert (cluster.nodes, cluster.accelerators_per_node) == (32, 8)
    assert cluster.accelerator.name == "B200 SXM 180 GB"
    assert cluster.links.network is not None and cluster.links.network.bytes_per_second == 100e9
    rack = load_cluster("4xGB300")
    assert (rack.nodes, rack.world, rack.links.node.bytes_per_second) == (1, 4, 900e9)
    for name, allowed in (
        ("100xh100", "a multiple of the 8 of a node, or fewer"),
        ("0xh100", "at least 1"),
        ("8xfoo", "one of a100-sxm-40gb"),
        ("b200", "or a number of accelerators such as 256xb200"),
    ):
        with pytest.raises(BadInputError, match=f"--cluster.*{name}.*{allowed}"):
            load_cluster(name)
