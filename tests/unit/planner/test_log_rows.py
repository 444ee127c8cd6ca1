"""If these fail, a log of another system becomes a row of another job, and its prediction is compared with a
time that it never took."""

import gzip
from pathlib import Path

import pytest

from myriad.cli.main import main
from myriad.errors import BadInputError
from myriad.forecasts.measured_rows import measured_table
from myriad.planner import TableOptions, log_cells, parse_table
from myriad.recipes.framework import ReadyRecipes

MEGATRON = """\
using world size: 64, data-parallel size: 4, tensor-model-parallel size: 4
------------------------ arguments ------------------------
  bf16 ............................................ True
  context_parallel_size ........................... 1
  expert_model_parallel_size ...................... 1
  ffn_hidden_size ................................. 11008
  fp8 ............................................. None
  global_batch_size ............................... 256
  group_query_attention ........................... False
  hidden_size ..................................... 4096
  micro_batch_size ................................ 2
  moe_router_topk ................................. 2
  num_attention_heads ............................. 32
  num_experts ..................................... None
  num_layers ...................................... 32
  num_query_groups ................................ 1
  padded_vocab_size ............................... 32000
  pipeline_model_parallel_size .................... 4
  recompute_granularity ........................... selective
  seq_length ...................................... 4096
  swiglu .......................................... True
  tensor_model_parallel_size ...................... 4
  use_distributed_optimizer ....................... True
  virtual_pipeline_model_parallel_size ............ 2
  world_size ...................................... 64
-------------------- end of arguments ---------------------
""" + "".join(
    f" [2024-04-06 02:59:{n:02}] iteration {n:8}/ 100 | consumed samples: {256 * n} | elapsed time per "
    f"iteration (ms): {ms} | global batch size:   256 | lm loss: 1.8 |\n"
    for n, ms in enumerate((44000.0, 5100.0, 5000.0, 5200.0), 1)
)
NEMO = """\
All distributed processes registered. Starting with 16 processes
tensor_model_parallel_size: 2
pipeline_model_parallel_size: 1
num_layers: 32
hidden_size: 4096
ffn_hidden_size: 14336
num_attention_heads: 32
num_query_groups: 8
seq_length: 8192
vocab_size: 128256
micro_batch_size: 1
gated_linear_unit: true
normalization: RMSNorm
Training epoch 0, iteration 0/9 | global_batch_size: 128 | train_step_timing in s: 30.1
Training epoch 0, iteration 1/9 | global_batch_size: 128 | train_step_timing in s: 5.99
"""
NANOTRON = """\
16:31:50 [INFO|DP=0|PP=0|TP=0]: Config(general=GeneralArgs(project='debug', seed=42),
       parallelism=ParallelismArgs(dp=4,
                                   pp=1,
                                   tp=2,
                                   recompute_layer=False,
                                   context_parallel_size=1),
       model=ModelArgs(model_config=LlamaConfig(hidden_size=2048, intermediate_size=8192,
                       num_attention_heads=32, num_hidden_layers=16, num_key_value_heads=8,
                       vocab_size=128256)),
       tokens=TokensArgs(sequence_length=4096, train_steps=100, micro_batch_size=2,
                         batch_accumulation_per_replica=8),
       optimizer=OptimizerArgs(zero_stage=1))
16:31:56 [INFO|DP=0|PP=0|TP=0]: iteration: 1 / 100 | elapsed_time_per_iteration_ms: 11.5K
16:31:59 [INFO|DP=0|PP=0|TP=0]: iteration: 2 / 100 | elapsed_time_per_iteration_ms: 2.45K
"""
TORCHTITAN = """\
[titan] INFO - CUDA capacity: NVIDIA H100 with 79.11GiB memory
[titan] INFO - Building device mesh with parallelism: pp=1, dp_replicate=2, dp_shard=8, cp=1, tp=1, ep=1
[titan] INFO - Building llama3 8B
[titan] INFO - Applied selective activation checkpointing to the model
[titan] INFO - Trainer is initialized with local batch size 1, global batch size 16, \
sequence length 8192, total steps 100 (warmup 20)
[titan] INFO - \x1b[31mstep:  1  \x1b[32mloss: 12.2  \x1b[34mtps: 1,020  \x1b[36mmfu: 6.0%\x1b[39m
[titan] INFO - \x1b[31mstep: 10  \x1b[32mloss: 10.1  \x1b[34mtps: 6,543  \x1b[36mmfu: 38.4%\x1b[39m
"""
OLD_MESH = TORCHTITAN.replace(
    "Building device mesh with parallelism: pp=1, dp_replicate=2, dp_shard=8, cp=1, tp=1, ep=1",
    "Building 2-D device mesh with ['dp_shard', 'tp'], [8, 2]",
)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            MEGATRON,
            "framework=megatron-core layers=32 hidden=4096 ffn=11008 heads=32 vocab=32000 seq=4096 gpus=64 "
            "tp=4 pp=4 cp=1 ep=1 vpp=2 micro_batch=2 global_batch=256 zero=1 recompute=selective dtype=bf16 "
            "activation=swiglu model=llama-32x4096 iteration_s=5.1",
        ),
        (
            NEMO,
            "framework=megatron-core layers=32 hidden=4096 ffn=14336 heads=32 kv_heads=8 vocab=128256 "
            "seq=8192 gpus=16 tp=2 pp=1 micro_batch=1 global_batch=128 zero=0 recompute=none dtype=bf16 "
            "activation=swiglu model=llama-32x4096 iteration_s=5.99",
        ),
        (
            NANOTRON,
            "framework=nanotron layers=16 hidden=2048 ffn=8192 heads=32 kv_heads=8 vocab=128256 seq=4096 "
            "gpus=8 dp=4 tp=2 pp=1 cp=1 micro_batch=2 global_batch=64 zero=1 recompute=none "
            "model=llama-16x2048 iteration_s=2.45",
        ),
        (
            TORCHTITAN,
            "framework=torchtitan model=llama3-8b seq=8192 gpus=16 gpu_type=H100 micro_batch=1 "
            "global_batch=16 zero=3 shard_group=8 recompute=selective tokens_per_s_per_gpu=6543",
        ),
        (
            OLD_MESH,
            "framework=torchtitan model=llama3-8b seq=8192 gpus=16 gpu_type=H100 tp=2 micro_batch=1 "
            "global_batch=16 zero=3 recompute=selective tokens_per_s_per_gpu=6543",
        ),
    ],
    ids=["Megatron-LM", "NeMo", "nanotron", "torchtitan", "torchtitan of 2024"],
)
def test_a_log_is_the_row_of_its_job(text: str, said: str) -> None:
    cells = log_cells("a.log", text)
    notes, source = cells.pop("notes"), cells.pop("source")
    assert cells == dict(one.split("=") for one in said.split())
    assert (notes.split(" ")[0], source) == ("median", "a.log")


@pytest.mark.parametrize(
    ("text", "lines", "sizes"),
    [
        (
            MEGATRON,
            "[Rank 0] (after 2 iterations) memory (MB) | allocated: 900.5 | max allocated: 41000.25 | "
            "reserved: 42000.0 | max reserved: 43000.0\n"
            "[Rank 8] (after 2 iterations) memory (MB) | allocated: 999999.5 | max allocated: 40000.5 | "
            "reserved: 42000.0 | max reserved: 44000.0\n",
            {"allocated_bytes": "41000.25 MiB", "reserved_bytes": "44000 MiB"},
        ),
        (
            NANOTRON,
            "Memory usage: 100.50MiB. Peak allocated 3000.25MiB. Peak reserved: 4000.00MiB\n",
            {"reserved_bytes": "4000 MiB"},
        ),
        (
            TORCHTITAN,
            "step: 20  loss: 9.9  memory: 45.63GiB(57.68%)  tps: 6,543\n",
            {"reserved_bytes": "45.63 GiB"},
        ),
    ],
    ids=["Megatron-LM", "nanotron", "torchtitan"],
)
def test_a_log_s_peak_memory_is_the_largest_of_any_rank(text: str, lines: str, sizes: dict[str, str]) -> None:
    cells = log_cells("a.log", text + lines)
    assert {column: cells[column] for column in cells if column.endswith("_bytes")} == sizes


def test_what_a_log_lacks_is_asked_for() -> None:
    with pytest.raises(BadInputError, match="no line of an iteration"):
        log_cells("a.log", "Traceback (most recent call last):\n")
    lines = MEGATRON[MEGATRON.index("-- end of") :]
    with pytest.raises(BadInputError, match=r"configuration at its start: gpus is not in it"):
        log_cells("a.log", lines)


def test_a_log_that_is_compressed_or_has_no_sequence_is_refused(tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    log.write_bytes(gzip.compress(MEGATRON.encode()))
    with pytest.raises(BadInputError, match="is compressed"):
        measured_table([str(log)])
    text = "sequence length 0\n10 tokens per train step\nstep: 1  loss: 3 tps: 7,000\n"
    with pytest.raises(BadInputError, match="gpus, global_batch is not in it"):
        log_cells("titan.log", text)


def test_a_row_without_a_kind_of_gpu_needs_a_cluster() -> None:
    text = "model,gpus,gpu_type,global_batch,iteration_s\nllama3-8b,16,,128,4.0\n"
    with pytest.raises(BadInputError, match="--cluster"):
        parse_table("t.csv", text, ReadyRecipes())
    options = TableOptions(cluster="megascale-256xa100")
    (row,) = parse_table("t.csv", text, ReadyRecipes(), options).rows
    assert (row.cluster.world, row.cluster.accelerator.name[:4]) == (16, "A100")
    same = parse_table("t.csv", text.replace(",gpu_type", "").replace(",,", ","), ReadyRecipes(), options)
    assert same.rows == (row,)
    with pytest.raises(BadInputError, match=r"my\.log, column 'gpu_type'"):
        parse_table("t.csv", text, ReadyRecipes(), places=[str(Path("my.log"))])


def test_a_table_of_logs_is_written_and_options_of_predictions_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log, out = tmp_path / "train.log", tmp_path / "rows.csv"
    log.write_text(MEGATRON)
    write = ["validate", "--from-log", str(log), "--out", str(out)]
    for more, says in ((["--json"], "without --json"), (["--cluster", "laptop"], "without --cluster")):
        with pytest.raises(SystemExit) as ended:
            main([*write, *more])
        assert ended.value.code == 2 and says in capsys.readouterr().err and not out.exists()
    with pytest.raises(SystemExit) as ended:
        main(write)
    assert not ended.value.code and "1 row" in capsys.readouterr().out
    other = tmp_path / "other.csv"
    other.write_text("a,b\n")
    with pytest.raises(SystemExit) as ended:
        main([*write[:-1], str(other)])
    assert ended.value.code == 2 and "a table that --from-log wrote" in capsys.readouterr().err
    assert other.read_text() == "a,b\n"
    assert (
        len(parse_table("rows", out.read_text(), ReadyRecipes(), TableOptions(cluster="eos-3072xh100")).rows)
        == 1
    )
