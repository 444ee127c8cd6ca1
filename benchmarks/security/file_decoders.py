"""Decoders of corpora, of files that a user writes or takes from elsewhere, and of files of a run."""

import gzip
import json
import struct
import zlib
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import xxhash

from decoder_target import Target, as_json, scratch, scratch_file, write_scratch
from mutations import JSON, JSON_LINES, TOML, Codec, dump_json

__all__ = ["FILE_TARGETS"]


# Corpora


def _corpus_index(data: bytes) -> None:
    from myriad.data.indexed import IndexedShard

    if not scratch_file("corpus/one.bin").is_file():
        write_scratch("corpus/one.bin", bytes(range(20)))
    write_scratch("corpus/one.idx", data)
    shard = IndexedShard(scratch() / "corpus/one")
    if shard.check_index() is None:
        for number in range(min(shard.num_documents, 64)):
            shard.document(number)
    else:
        shard.read(0, np.zeros(min(4, shard.num_tokens), np.int32))


def _index(lengths: Sequence[int], starts: Sequence[int], documents: Sequence[int]) -> bytes:
    head = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, len(lengths), len(documents))
    arrays = (
        np.array(lengths, "<i4").tobytes()
        + np.array(starts, "<i8").tobytes()
        + np.array(documents, "<i8").tobytes()
    )
    return head + arrays


def _load_index(data: bytes) -> Any:
    _, version, code, sequences, documents = struct.unpack_from("<9sQBQQ", data)
    first, second = 34 + 4 * sequences, 34 + 12 * sequences
    return {
        "head": [version, code, sequences, documents],
        "lengths": np.frombuffer(data[34:first], "<i4").tolist(),
        "starts": np.frombuffer(data[first:second], "<i8").tolist(),
        "documents": np.frombuffer(data[second : second + 8 * documents], "<i8").tolist(),
    }


def _dump_index(value: Any) -> bytes:
    version, code, sequences, documents = value["head"]
    head = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", version, code, sequences, documents)
    arrays = [
        np.array(value[key], kind)
        for key, kind in (("lengths", "<i4"), ("starts", "<i8"), ("documents", "<i8"))
    ]
    return head + b"".join(one.tobytes() for one in arrays)


def _corpus_manifest(data: bytes) -> None:
    from myriad.data.corpus_manifest import parse_manifest

    manifest = parse_manifest(data, "CORPUS")
    assert manifest.num_tokens("train") >= 0 and manifest.num_documents("validation") >= 0


def _corpus_examples() -> list[bytes]:
    file = {"size_bytes": 20, "xxh3_128": "0" * 32}
    shard = {"name": "train-00000", "split": "train", "tokens": 10, "documents": 2}
    content = {
        "format": "myriad-corpus-1",
        "fingerprint": "ab" * 16,
        "vocabulary": 300,
        "end_of_document": 0,
        "shards": [shard],
        "text_bytes": {"train": 40, "validation": 0},
        "skipped": {"null": 1},
        "files": {"train-00000.bin": file, "train-00000.idx": file, "tokenizer.json": file},
        "plan": {"inputs": ["a"]},
    }
    return [_seal_corpus(content)]


def _seal_corpus(content: Any) -> bytes:
    if not isinstance(content, dict):
        return dump_json(content)
    content = {key: value for key, value in content.items() if key != "content_xxh3_128"}
    own = xxhash.xxh3_128_hexdigest(json.dumps(content, indent=1, sort_keys=True).encode())
    return (json.dumps({"content_xxh3_128": own, **content}, indent=1, sort_keys=True) + "\n").encode()


def _block_hashes(data: bytes) -> None:
    from myriad.data.block_hashes import BlockHashes

    hashes = BlockHashes.parse(data)
    for number in range(min(8, len(hashes.hashes))):
        hashes.span(number)
        hashes.is_right(number, b"")


_BLOCKS = struct.Struct("<8sIIQ")


def _seal_blocks(value: Any) -> bytes:
    block, kind, size, *hashes = value
    body = _BLOCKS.pack(b"MYRBLK1\0", block, kind, size) + struct.pack(f"<{len(hashes)}Q", *hashes)
    return body + xxhash.xxh3_128_digest(body)


def _load_blocks(data: bytes) -> Any:
    _, block, kind, size = _BLOCKS.unpack_from(data)
    return [block, kind, size, *np.frombuffer(data[_BLOCKS.size : -16], "<u8").tolist()]


def _tokenizer(data: bytes) -> None:
    from myriad.data.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(write_scratch("tokenizer.json", data))
    tokenizer.check_complete()
    tokenizer.decode(tokenizer.encode("A text, 12."))
    _ = tokenizer.fingerprint, tokenizer.vocabulary, tokenizer.token_bytes


@cache
def _tokenizer_examples() -> tuple[bytes, ...]:
    from myriad.data.tokenizer import Tokenizer

    text = json.loads(Tokenizer.train(["a text of words, a text of 12"], 262).as_text())
    small = {
        "version": "1.0",
        "added_tokens": [{"id": 3, "content": "</s>", "special": True, "single_word": False, "lstrip": False}
                         | {"rstrip": False, "normalized": False}],
        "pre_tokenizer": {"type": "Whitespace"},
        "model": {"type": "WordLevel", "vocab": {"A": 0, "text": 1, "[UNK]": 2}, "unk_token": "[UNK]"},
    }  # fmt: skip
    return dump_json(small), dump_json(text)


def _documents(data: bytes) -> None:
    from myriad.data.file_documents import FileRange, read_documents
    from myriad.data.records import RecordForm

    path = write_scratch("documents.jsonl", data)
    for _ in read_documents(FileRange(str(path), "jsonl", 0, len(data)), RecordForm()):
        pass


def _stream_sources(data: bytes) -> None:
    from myriad.data.streaming.source_list import parse_sources

    found = parse_sources(data, "sources.json")
    assert found.num_bytes >= 0 and len(found.sources) == len(found.files)


def _seal_sources(value: Any) -> bytes:
    head = {key: value.get(key) for key in ("format", "files")}
    own = xxhash.xxh3_128(json.dumps([head["format"], head["files"]]).encode()).hexdigest()
    return json.dumps({**value, "content_xxh3_128": own}).encode()


def _source_examples() -> list[bytes]:
    files = [["file:///a.jsonl", "jsonl", 20, "1.5"], ["s3://b/c.parquet", "parquet", 9, '"etag"']]
    return [_seal_sources({"format": "myriad-stream-1", "name": "raw:x", "files": files})]


def _stream_index(data: bytes) -> None:
    from myriad.data.streaming.group_index import GroupIndex

    write_scratch("index/x-0.jsonl", data)
    index = GroupIndex(scratch() / "index", "x")
    for number in range(min(len(index), 8)):
        index.start(number + 1)
    assert index.find(index.num_windows) is None


def _stream_lines() -> list[bytes]:
    from myriad.data.streaming.group_index import GroupRecord, dump_record
    from myriad.data.streaming.group_order import Cursor, GroupStart

    start = GroupStart(0, 0, 1, (Cursor(0, 77), Cursor(1)))
    records = [GroupRecord(number, 5, 90, 3, {"null": 1}, "ab", start) for number in range(2)]
    return [b"".join(json.dumps(dump_record(record)).encode() + b"\n" for record in records)]


# Files that a user writes, or takes from elsewhere


def _job(data: bytes) -> None:
    from myriad.config import dump_toml
    from myriad.job import load_job

    found = load_job(str(write_scratch("job.toml", data)))
    if not (scratch() / "again.toml").exists() or len(data) % 7 == 0:
        assert load_job(str(write_scratch("again.toml", dump_toml(found).encode()))) == found


def _job_examples() -> list[bytes]:
    from myriad.config import dump_toml
    from myriad.job import load_job

    short = b'name = "x"\nmodel = "tiny"\ndata.vocabulary = 512\n[train]\nsteps = 4\nglobal_batch = 8\n'
    short += b"[layout]\ndp = 2\nmicro_batch = 2\n"
    tree = {"name": "y", "model": {"recipe": "tiny", "layers": 4}, "data": {"vocabulary": 512}}
    tree |= {
        "optimizer": {"learning_rate": 1e-3},
        "alerts": {"webhook": {"url": "https://x"}},
        "layout": {"pp": 2, "tp": 2},
    }
    return [short, TOML.dump(tree), dump_toml(load_job("tiny")).encode()]


def _override(data: bytes) -> None:
    from myriad.job import load_job

    text = data.decode(errors="replace")
    load_job("tiny", [line for line in text.split("\n") if line][:4])


def _cluster(data: bytes) -> None:
    from myriad.recipes.cluster import load_cluster

    load_cluster(str(write_scratch("cluster.toml", data)))


def _recipes(kind: Any, *names: str) -> list[bytes]:
    from myriad.recipes import read_recipe

    return [TOML.dump(read_recipe(kind, name, kind)) for name in names]


def _scenario(data: bytes) -> None:
    from myriad.faults.scenario import load_scenario, planned_faults

    scenario = load_scenario(str(write_scratch("scenario.toml", data)))
    planned_faults(scenario, scenario.resolved_job())


def _mix(data: bytes) -> None:
    from myriad.forecasts.fleet.fault_mix import load_mix

    load_mix(str(write_scratch("mix.toml", data))).per_day(8)


def _translated(made: Any) -> None:
    made.lists()
    made.toml("translated")


def _megatron_text(data: bytes) -> None:
    from myriad.job.translation.megatron_arguments import read_command_line, translate_arguments

    _translated(translate_arguments(read_command_line(data.decode(errors="replace"))))


_MEGATRON: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "group_query_attention": True,
    "num_query_groups": 2,
    "seq_length": 128,
    "max_position_embeddings": 128,
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "add_bias_linear": False,
    "untie_embeddings_and_output_weights": True,
    "padded_vocab_size": 512,
    "micro_batch_size": 2,
    "global_batch_size": 16,
    "train_iters": 100,
    "lr": 3e-4,
    "min_lr": 3e-5,
    "lr_decay_style": "cosine",
    "lr_warmup_fraction": 0.01,
    "clip_grad": 1.0,
    "adam_beta1": 0.9,
    "fp16": True,
    "initial_loss_scale": 65536.0,
    "world_size": 8,
    "tensor_model_parallel_size": 2,
    "pipeline_model_parallel_size": 2,
    "num_layers_per_virtual_pipeline_stage": 1,
    "data_path": [0.3, "a", 0.7, "b"],
    "window_size": [63, 0],
    "recompute_granularity": "selective",
    "train_samples": None,
    "lr_warmup_samples": 0,
    "lr_wsd_decay_iters": None,
    "use_distributed_optimizer": True,
}
_MEGATRON_TEXT = b"""GPT_ARGS=(
    --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length $LENGTH
    --max-position-embeddings 128 --bf16 --lr 3e-4 --min-lr 3e-5 --lr-decay-style cosine --train-iters 100
)
LENGTH=128
torchrun --nproc_per_node 8 pretrain_gpt.py ${GPT_ARGS[@]} --micro-batch-size 2 --global-batch-size=16 \\
  --tensor-model-parallel-size 2 --window-size '(63, 0)' --data-path 0.3 a 0.7 b --no-bias-gelu-fusion
"""


def _megatron_namespace(data: bytes) -> None:
    from myriad.job.translation.megatron_arguments import translate_arguments

    try:
        values = json.loads(data)
    except (ValueError, RecursionError):
        return
    if isinstance(values, dict):
        _translated(translate_arguments(values, namespace=True))


_DEEPSPEED: dict[str, Any] = {
    "train_batch_size": 16,
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "fp16": {"enabled": True, "initial_scale_power": 16, "loss_scale_window": 1000, "min_loss_scale": 1},
    "zero_optimization": {"stage": 2, "overlap_comm": True, "offload_optimizer": {"device": "none"}},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": 3e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1},
    },
    "scheduler": {
        "type": "WarmupCosineLR",
        "params": {
            "warmup_num_steps": 10,
            "total_num_steps": 100,
            "warmup_max_lr": 3e-4,
            "cos_min_ratio": 0.1,
        },
    },
    "activation_checkpointing": {"number_checkpoints": 2},
    "tensor_parallel": {"autotp_size": 2},
    "wandb": {"enabled": False},
}


def _deepspeed(data: bytes) -> None:
    from myriad.job.translation.deepspeed_json import translate_deepspeed
    from myriad.system.whole_file import parse_json

    try:
        found = parse_json(data)
    except ValueError:
        return
    if isinstance(found, dict):
        _translated(translate_deepspeed(found))


# Files of a run and of the doctor, which another machine or version may have written


def _lines(data: bytes) -> None:
    from myriad.run.run_lines import EventLines, StepLines
    from myriad.system.jsonl import late_events

    path = write_scratch("metrics.jsonl", data)
    steps = StepLines(path)
    steps.poll()
    late_events(EventLines(path).poll())


_STEP_LINE = {
    "step": 1,
    "time": 1.7e9,
    "loss": 2.5,
    "gradient_norm": 1.0,
    "learning_rate": 1e-3,
    "tokens": 512,
}
_LINES = dump_json(_STEP_LINE) + b"\n" + dump_json(_STEP_LINE | {"step": 2}) + b"\n"
_EVENTS = (
    b'{"time": 1.7e9, "event": "start", "attempt": 1}\n{"time": 1.7e9, "event": "x", "late_seconds": 2}\n'
)


def _driver_address(data: bytes) -> None:
    from myriad.supervise.driver_address import read_address

    write_scratch("run/driver.json", data)
    read_address(scratch() / "run")


def _baseline(data: bytes) -> None:
    from myriad.doctor.baseline import merge, read_baseline, write_baseline

    found = read_baseline(write_scratch("baseline.json", data))
    write_baseline(scratch_file("again.json"), merge(found, {}))


def _link_evidence(data: bytes) -> None:
    from myriad.telemetry.links.link_evidence import describe_evidence

    describe_evidence(write_scratch("evidence.gz", data))


def _evidence_examples() -> list[bytes]:
    from myriad.telemetry.links.link_ring import FIRST_COLUMNS, LINK_COLUMNS

    fields = ["time", *FIRST_COLUMNS[1:], *(f"eth0.{one}" for one in LINK_COLUMNS)]
    rows = [[0.01 * number, *[100 * number] * (len(fields) - 1)] for number in range(4)]
    return [_packed([{"fields": fields, "epoch_ns": 10**18, "node": 0, "why": "x"}, *rows])]


def _packed(rows: Any) -> bytes:
    return gzip.compress(JSON_LINES.dump(rows), 1, mtime=0)


def _unpacked(data: bytes) -> Any:
    try:
        return JSON_LINES.load(gzip.decompress(data))
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(str(error)) from None


FILE_TARGETS: tuple[Target, ...] = (
    Target(
        "corpus: index",
        _corpus_index,
        lambda: [_index([4, 6], [0, 8], [0, 1, 2])],
        Codec(_load_index, _dump_index),
    ),
    Target(
        "corpus: manifest", _corpus_manifest, _corpus_examples, Codec(json.loads, _seal_corpus, sealed=True)
    ),
    Target(
        "corpus: block hashes",
        _block_hashes,
        lambda: [_seal_blocks([1 << 16, 8, 100000, 1, 2])],
        Codec(_load_blocks, _seal_blocks, sealed=True),
        (ValueError,),
    ),
    Target(
        "corpus: documents", _documents, lambda: [b'{"text": "one"}\n{"text": null, "id": 3}\n'], JSON_LINES
    ),
    Target(
        "stream: sources", _stream_sources, _source_examples, Codec(json.loads, _seal_sources, sealed=True)
    ),
    Target("stream: index", _stream_index, _stream_lines, JSON_LINES),
    Target("tokenizer.json", _tokenizer, _tokenizer_examples, JSON, slow=True),
    Target("job file", _job, _job_examples, TOML, slow=True),
    Target(
        "job overrides",
        _override,
        lambda: [
            b"layout.dp=2\ntrain.steps=4",
            b'model={recipe="tiny", layers=2}',
            b"optimizer.clip_norm=off",
        ],
        slow=True,
        most_bytes=2048,
    ),
    Target(
        "cluster file",
        _cluster,
        lambda: _recipes("clusters", "one-node-8xa800", "h200-512xh200", "laptop"),
        TOML,
    ),
    Target("fault scenario", _scenario, lambda: _recipes("faults", "abort-rank", "soak"), TOML, slow=True),
    Target("fault mix", _mix, lambda: _recipes("mixes", "llama3", "megascale"), TOML),
    Target(
        "Megatron-LM: command line",
        _megatron_text,
        lambda: [_MEGATRON_TEXT],
        slow=True,
        most_bytes=2048,
    ),
    Target("Megatron-LM: arguments", _megatron_namespace, as_json(_MEGATRON), JSON, slow=True),
    Target("DeepSpeed: JSON", _deepspeed, as_json(_DEEPSPEED), JSON, slow=True),
    Target("run: lines", _lines, lambda: [_LINES, _EVENTS], JSON_LINES),
    Target(
        "run: driver.json",
        _driver_address,
        as_json({"host": "::1", "port": 9, "term": 3, "silent_seconds": 2.0, "alone_seconds": 9}),
        JSON,
        (ValueError, OSError),
    ),
    Target(
        "doctor: baseline",
        _baseline,
        as_json({"format": 1, "hardware": {"cpu x 64": {"memory": 2.1e11, "bits": "ab"}}}),
        JSON,
    ),
    Target(
        "link counters",
        _link_evidence,
        _evidence_examples,
        Codec(_unpacked, _packed, sealed=True),
        (ValueError, OSError),
    ),
)
