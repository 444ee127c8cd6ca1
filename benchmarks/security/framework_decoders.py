"""Decoders of what describes other systems: framework files, tables of iterations, training logs; and of
tasks to evaluate."""

from typing import Any

from decoder_target import Target, write_scratch
from mutations import JSON_LINES, TOML, dump_json

__all__ = ["FRAMEWORK_TARGETS"]


def _framework(data: bytes) -> None:
    from myriad.recipes.framework import load_framework

    load_framework(str(write_scratch("framework.toml", data)))


def _framework_examples() -> list[bytes]:
    from myriad.recipes import read_recipe

    return [TOML.dump(read_recipe("frameworks", name, "framework")) for name in ("nanotron", "megatron-core")]


_TABLE = (
    b"framework,model,layers,hidden,heads,seq,vocab,gpus,gpu_type,interconnect,tp,pp,vpp,micro_batch,"
    b"global_batch,recompute,dtype,iteration_s,tokens_per_s_per_gpu,tflops_per_gpu,mfu,flops,notes\n"
    b"nanotron,llama-1b,16,2048,16,4096,32000,16,H100,8x400G,2,1,,2,128,none,bf16,1.5,,,,,ZeRO-1\n"
    b"unknown,gpt-x,4,1024,16,2048,51200,8,A100-SXM-80GB,,1,2,2,1,64,full,bf16,,3000,,,,\n"
    b"megatron-core,mixtral-8x7b,,,,,,64,H100,,4,2,,1,256,,bf16,,,400,40,model,64 experts of 2048 top-8\n"
)


def _table(data: bytes) -> None:
    from myriad.planner import parse_table
    from myriad.recipes.framework import ReadyRecipes

    parse_table("table.csv", data.decode("utf-8", "replace"), ReadyRecipes())


_LOG = (
    b"------------------------ arguments ------------------------\n"
    b"  world_size ...................................... 8\n"
    b"  num_layers ...................................... 4\n"
    b"  hidden_size ..................................... 1024\n  seq_length ............ 2048\n"
    b"  num_attention_heads ........ 16\n  micro_batch_size ......... 1\n  global_batch_size ......... 64\n"
    b" iteration        2/ 100 | elapsed time per iteration (ms): 5100.0 | global batch size:    64 |\n"
    b" iteration        3/ 100 | elapsed time per iteration (ms): 5000.0 | global batch size:    64 |\n"
)


def _log(data: bytes) -> None:
    from myriad.planner import log_cells

    log_cells("train.log", data.decode("utf-8", "replace"))


_TASKS: tuple[dict[str, Any], ...] = (
    {"task_name": "a", "request_type": "loglikelihood", "arguments": ["The sky is", " blue"], "target": 0},
    {"task_name": "b", "request_type": "loglikelihood_rolling", "doc_id": 1, "arguments": ["a text"]},
    {
        "task_name": "c",
        "request_type": "generate_until",
        "arguments": ["1 + 1 =", {"until": ["\n"], "max_gen_toks": 8}],
        "target": "2",
    },
    {"task_name": "d", "arguments": [["2 + 2 =", " 3"], ["2 + 2 =", " 4"]], "target": 1},
)


def _tasks(data: bytes) -> None:
    from myriad.evaluation.task_files import read_tasks

    read_tasks([str(write_scratch("tasks.jsonl", data))])


FRAMEWORK_TARGETS: tuple[Target, ...] = (
    Target("framework file", _framework, _framework_examples, TOML),
    Target("table of iterations", _table, lambda: [_TABLE], slow=True),
    Target("training log", _log, lambda: [_LOG]),
    Target("eval: tasks", _tasks, lambda: [b"".join(dump_json(one) + b"\n" for one in _TASKS)], JSON_LINES),
)
