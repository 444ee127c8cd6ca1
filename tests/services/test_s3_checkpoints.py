"""Checkpoints on an S3 server: what was saved there must bring a run back bit for bit, damage must be seen, a
server that is away must not stop training, and ten thousand ranks must not each read the same bytes."""

import gzip
import itertools
import json
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as arrow
import pytest
from pyarrow import parquet
from ranks import run_ranks
from same_run import assert_same_run, tensors_at, train_undisturbed
from tiny_corpora import lines
from typer.testing import CliRunner, Result
from watched_runs import (
    TWO_REPLICAS,
    events,
    kill_run,
    lose_ranks,
    make_run,
    stored_at,
    train,
    wait_for_event,
    wait_for_snapshot_server_to_end,
)

from myriad.checkpoint.storage.checkpoint_folder import CheckpointFolder
from myriad.cli.main import build_app
from myriad.comm.typed_collectives import gather_values
from myriad.data.bad_blocks import BadBlockError
from myriad.data.config import DataConfig
from myriad.data.corpus import read_batch
from myriad.data.corpus_opening import open_corpora
from myriad.data.tokenizer import Tokenizer
from myriad.errors import BadInputError
from myriad.job import load_job
from myriad.run import Run
from myriad.train.trainer import Trainer

if TYPE_CHECKING:
    from object_store import ObjectStore


@pytest.fixture(scope="module")
def s3(object_store: "ObjectStore") -> Any:
    import boto3

    return boto3.client("s3", endpoint_url=object_store.url)


@pytest.fixture
def bucket(s3: Any, request: pytest.FixtureRequest) -> str:
    """Of this test alone."""
    name = "".join(c if c.isalnum() else "-" for c in request.node.name.lower())[-60:].strip("-")
    s3.create_bucket(Bucket=name)
    return name


@pytest.fixture
def start(tmp_path: Path, corpus: Path) -> Callable[..., Run]:
    return lambda name, *overrides: make_run(tmp_path / name, corpus, *overrides)


def checkpoint(*arguments: object) -> Result:
    return CliRunner().invoke(build_app(), ["checkpoint", *map(str, arguments)])


def flip(s3: Any, bucket: str, key: str, at: float = 0.5) -> None:
    """One bit of an object."""
    content = bytearray(s3.get_object(Bucket=bucket, Key=key)["Body"].read())
    content[int(at * len(content))] ^= 4
    s3.put_object(Bucket=bucket, Key=key, Body=bytes(content))


def test_a_run_that_lost_its_machine_continues_from_s3_to_the_bits_of_an_undisturbed_one(start, bucket):
    keys = [*TWO_REPLICAS, "layout.zero=3", "train.steps=15", "checkpoint.every=5", "overlap.checkpoint=off"]
    run, undisturbed = start("lost", *keys, f"checkpoint.url=s3://{bucket}/run"), start("whole", *keys)
    lose_ranks(run, {12: partial(kill_run, run)})
    assert run.read_metrics()[-1]["step"] == 12
    assert train(run) == [0, 0]
    (resumed,) = events(run, "resume")
    assert (resumed["step"], resumed["source"]) == (10, "storage")
    assert_same_run(run, train_undisturbed(undisturbed))
    assert not any(run.checkpoints_path.iterdir()), "all of it is in the bucket"


def test_what_is_in_the_bucket_is_listed_verified_compared_and_pruned(start, bucket, s3):
    url = f"s3://{bucket}/run"
    run = start("run", "train.steps=15", "checkpoint.every=5", "checkpoint.keep=3", f"checkpoint.url={url}")
    assert train(run, {step + 1: stored_at(run, step) for step in (5, 10)}) == [0]
    rows = json.loads(checkpoint("list", run.path, "--verify", "--json").stdout)["checkpoints"]
    assert [(row["step"], row["state"]) for row in rows] == [(step, "verified") for step in (5, 10, 15)]
    assert rows[0]["path"] == f"{url}/step-5" and rows[0]["bytes"] > 100_000
    assert checkpoint("verify", run.path).exit_code == checkpoint("verify", f"{url}/step-10").exit_code == 0
    assert checkpoint("diff", f"{url}/step-10", f"{url}/step-10").stdout.endswith("equal bits\n")
    assert checkpoint("diff", f"{url}/step-10", f"{url}/step-15").exit_code == 1
    flip(s3, bucket, "run/step-10/__0_0.distcp")
    found = checkpoint("verify", run.path)
    assert found.exit_code == 1 and "step-10/__0_0.distcp: chunk " in found.stdout, found.stdout
    assert found.stdout.count(": whole") == 2
    assert checkpoint("prune", run.path, "--keep", 1).stdout == "removed 2, kept 15\n"
    left = {entry["Key"] for entry in s3.list_objects_v2(Bucket=bucket)["Contents"]}
    assert {key.split("/")[1] for key in left} == {"attempt", "run.json", "step-15"}


def test_every_verb_reads_and_writes_buckets(start, bucket, s3, tmp_path):
    url, cut = f"s3://{bucket}/a run #1 %20 é", f"s3://{bucket}/cut"
    run = start("run", "train.steps=4", f"checkpoint.url={url}", "model.activation=swiglu")
    assert train(run) == [0]
    done = checkpoint("reshard", url, cut, "--layout.tp", 2, "--json")
    assert done.exit_code == 0 and json.loads(done.stdout)["out"] == f"{cut}/step-4", done.output
    assert isinstance(checkpoint("reshard", url, cut).exception, BadInputError), "it is there already"
    assert isinstance(checkpoint("reshard", url, "s3://not-there/cut").exception, BadInputError)
    for place in (run.path, url, f"{url}/", f"{url}/step-4", cut, f"{cut}/step-4/"):
        (row,) = json.loads(checkpoint("list", place, "--verify", "--json").stdout)["checkpoints"]
        assert (row["step"], row["state"]) == (4, "verified")
    for place in (url, f"{cut}/step-4/"):
        assert checkpoint("verify", place).exit_code == 0
        assert checkpoint("diff", place, cut).exit_code == checkpoint("diff", cut, place).exit_code == 0
        out = tmp_path / f"out-{len(list(tmp_path.iterdir()))}"
        assert checkpoint("export", place, out).exit_code == 0 and (out / "model.safetensors").exists()
    assert checkpoint("reshard", f"{cut}/step-4", tmp_path / "local").exit_code == 0
    assert checkpoint("prune", cut, "--keep", 1).stdout == "removed 0, kept 4\n"
    keys = {entry["Key"] for entry in s3.list_objects_v2(Bucket=bucket, Prefix="cut/")["Contents"]}
    assert {key.rpartition("/")[2] for key in keys} >= {"manifest.json", "job.toml", "__1_0.distcp"}
    assert "cut/step-4/writer" not in keys
    for wrong in (f"s3://{bucket}/nothing", f"{url}/step-3", "s3://not-there/run", "s3://"):
        refused = checkpoint("list", wrong)
        assert isinstance(refused.exception, BadInputError) and "\n" not in str(refused.exception), wrong


def test_a_second_run_does_not_store_where_another_one_does(start, bucket):
    url = f"checkpoint.url=s3://{bucket}/run"
    first, second = start("first", "train.steps=4", url), start("second", "train.steps=4", url)
    assert train(first) == [0]
    assert train(second) == [2]
    first.path.rename(first.path.with_name("gone"))
    assert train(second) == [0]
    assert str(first.path) in events(second, "taken_over")[0]["run"]


def test_a_flipped_bit_in_the_bucket_is_never_trained_on(start, bucket, s3):
    keys = ["train.steps=15", "checkpoint.every=5", "overlap.checkpoint=off"]
    run, undisturbed = start("run", *keys, f"checkpoint.url=s3://{bucket}/run"), start("undisturbed", *keys)
    assert train(run) == [0]
    wait_for_snapshot_server_to_end(run)
    flip(s3, bucket, "run/step-15/__0_0.distcp")
    assert train(run) == [0]
    (fault,) = events(run, "fault")
    assert "step-15/__0_0.distcp: " in fault["problem"] and fault["set_aside"] == ["step-15.damaged"]
    assert events(run, "resume")[0]["step"] == 10
    assert "step-15.damaged" in CheckpointFolder(run.checkpoints()).storage.names()
    assert_same_run(run, train_undisturbed(undisturbed))


def load_and_compare(run: Run, expected: dict[str, np.ndarray]) -> tuple[int, int]:
    """On one rank: the step, and how many elements are not those that were saved."""
    trainer = Trainer(run)
    wrong = 0
    for part in trainer.engine.all_shards():
        inside = tuple(slice(o, o + n) for o, n in zip(part.offsets, part.values.shape, strict=True))
        wrong += int((part.values.detach().numpy() != expected[part.name][inside]).sum())
    gather_values(wrong, int, trainer.engine.groups.world)  # the first to end takes the node's loader with it
    trainer.close()
    return trainer.step, wrong


@pytest.fixture(scope="module")
def saved(
    s3: Any, corpus: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Run, dict[str, np.ndarray]]:
    """A run of two shards that has ended, and what it left in a bucket."""
    s3.create_bucket(Bucket="saved")
    keys = [*TWO_REPLICAS, "layout.zero=1", "train.steps=4", "checkpoint.url=s3://saved/run"]
    run = make_run(tmp_path_factory.mktemp("saved") / "run", corpus, *keys)
    assert train(run) == [0, 0]
    wait_for_snapshot_server_to_end(run)
    return run, tensors_at(run, 4)


@pytest.mark.parametrize(
    "layout",
    [
        {"dp": 2, "zero": 3, "micro_batch": 2},
        {"dp": 2, "tp": 2, "micro_batch": 4},
        {"dp": 2, "pp": 2, "zero": 1, "micro_batch": 2},
    ],
    ids=lambda layout: " ".join(f"{key} {value}" for key, value in layout.items()),
)
def test_every_byte_is_read_from_the_bucket_once_whoever_needs_it(saved, layout, object_store):
    """By the server's count: replicas that each read for themselves would bring any storage to its knees."""
    run, expected = saved
    keys = [f"layout.{key}={value}" for key, value in layout.items()]
    job = load_job(str(run.job_path), ["layout.zero=0", "layout.dp=1", "layout.micro_batch=8", *keys])
    run.create_or_resume(job)
    before = object_store.mark()
    world = job.layout.world
    assert run_ranks(world, load_and_compare, run, expected, timeout=120) == [(4, 0)] * world
    wait_for_snapshot_server_to_end(run)
    reads = [request for request in object_store.requests(before) if request.method == "GET"]
    spans: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for request in reads:
        if request.path.endswith(".distcp"):
            assert request.status == 206 and request.span is not None
            spans[request.path.rpartition("/")[2]].append(request.span)
    manifest = CheckpointFolder(run.checkpoints()).at_step(4).manifest()
    for name, record in manifest.files.items():
        if name.endswith(".distcp"):
            _assert_read_once(sorted(spans[name]), record)
    assert sum(request.path.endswith("manifest.json") for request in reads) == 1


def _assert_read_once(spans: list[tuple[int, int]], record: Any) -> None:
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans)), spans
    for chunk in record.chunks:
        if chunk.bytes and not chunk.tensor.startswith("random."):
            start, end = chunk.data_start, chunk.data_start + chunk.bytes
            assert any(low <= start and end <= high for low, high in spans), chunk


def test_training_continues_while_the_server_is_away_and_saves_when_it_is_back(start, bucket, object_store):
    run = start("run", "train.steps=30", "checkpoint.every=5", f"checkpoint.url=s3://{bucket}/run")

    def away() -> None:
        stored_at(run, 5)()
        object_store.go_down()

    def told(step: int) -> Callable[[], None]:
        return lambda: wait_for_event(run, "fault", step=step)

    acts = {
        6: away,
        11: told(10),
        16: told(15),
        21: told(20),
        22: object_store.come_back,
        26: stored_at(run, 25),
    }
    try:
        assert train(run, acts) == [0]
    finally:
        object_store.come_back()
    faults = [fault for fault in events(run, "fault") if "failures" in fault]
    assert [(fault["step"], fault["failures"], "alarm" in fault) for fault in faults] == [
        (10, 1, False),
        (15, 2, False),
        (20, 3, True),
    ]
    assert all("\n" not in fault["problem"] for fault in faults)
    wait_for_snapshot_server_to_end(run)  # it prunes older ones
    folder = CheckpointFolder(run.checkpoints())
    assert folder.newest() == (30, []) and folder.unfinished() == []


def myriad(folder: Path, corpus: Path, url: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "myriad.cli.main", "train", "tiny", "--run", str(folder)]
    keys = ["--data.corpus", str(corpus), "--checkpoint.url", url]
    return subprocess.run([*command, *keys], capture_output=True, text=True, timeout=120, cwd=folder.parent)


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("s3://nobody-made-this/run", "bucket does not exist"),
        ("xyz://somewhere/run", "Protocol not known: xyz"),
    ],
)
def test_a_place_that_is_not_there_is_refused_before_anything_begins(
    tmp_path, corpus, object_store, url, told
):
    _assert_refused(myriad(tmp_path / "run", corpus, url), url, told, tmp_path)


def test_without_credentials_a_run_is_refused_before_anything_begins(tmp_path, corpus, bucket, monkeypatch):
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    url = f"s3://{bucket}/run"
    _assert_refused(myriad(tmp_path / "run", corpus, url), url, "credentials", tmp_path)


def test_a_server_that_is_not_there_is_refused_before_anything_begins(tmp_path, corpus, bucket, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    url = f"s3://{bucket}/run"
    _assert_refused(myriad(tmp_path / "run", corpus, url), url, "127.0.0.1:1", tmp_path)


def _assert_refused(done: "subprocess.CompletedProcess[str]", url: str, told: str, folder: Path) -> None:
    assert done.returncode == 2, done.stderr
    [line] = done.stderr.strip().splitlines()
    assert f'checkpoint.url = "{url}": ' in line and told in line, line
    assert not (folder / "run").exists()


def test_a_corpus_in_a_bucket_and_over_http_is_the_one_on_disk(
    bucket: str, s3: Any, corpus: Path, object_store: "ObjectStore", tmp_path: Path
):
    for path in corpus.iterdir():
        s3.upload_file(str(path), bucket, f"data/{path.name}", ExtraArgs={"ACL": "public-read"})

    def read(name: str, rows: int = 20) -> np.ndarray:
        opened = open_corpora(DataConfig(corpus=name, cache=str(tmp_path / "cache")), 32)
        assert not opened.unchecked
        return read_batch(opened, opened.sampler(1), range(rows))

    urls = f"s3://{bucket}/data", f"{object_store.url}/{bucket}/data", f"s3://{bucket}/data/train-00000"
    for url in urls:
        assert np.array_equal(read(url), read(str(corpus))), url
    flip(s3, bucket, "data/train-00000.bin")
    for url in urls:
        assert np.array_equal(read(url), read(str(corpus))), "from the cache"
    shutil.rmtree(tmp_path / "cache")
    content = s3.get_object(Bucket=bucket, Key="data/train-00000.bin")["Body"].read()
    s3.put_object(Bucket=bucket, Key="data/train-00000.bin", Body=content, ACL="public-read")
    s3.put_object(Bucket=bucket, Key="private/manifest.json", Body=b"{}")
    with pytest.raises(BadInputError, match=r"manifest\.json cannot be read: 403"):
        read(f"{object_store.url}/{bucket}/private")
    for url in urls:
        with pytest.raises(BadBlockError, match=f"{url.removesuffix('/train-00000')}/train-00000.bin: the "):
            read(url)


def test_text_that_is_streamed_from_a_bucket_has_the_tokens_of_the_disk(
    bucket: str, s3: Any, tmp_path: Path
) -> None:
    """Plain and compressed JSONL, and Parquet, over several groups."""
    found = lines(400)
    records = [json.dumps({"text": line}) + "\n" for line in found]
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.jsonl").write_text("".join(records[:200]))
    (tmp_path / "texts" / "b.jsonl.gz").write_bytes(gzip.compress("".join(records[200:300]).encode()))
    parquet.write_table(arrow.table({"text": found[300:]}), tmp_path / "texts" / "c.parquet")
    Tokenizer.train(found, 300).save(tmp_path)
    for path in (tmp_path / "texts").iterdir():
        s3.upload_file(str(path), bucket, f"texts/{path.name}")

    def rows(corpus: str) -> Any:
        config = DataConfig(corpus=corpus, tokenizer=str(tmp_path), shuffle_bytes=2**16, tokenizer_threads=1)
        opened = open_corpora(config, 32)
        try:
            return read_batch(opened, opened.sampler(1), range(300))
        finally:
            opened.close()

    near = rows(f"raw:{tmp_path / 'texts'}")
    assert np.array_equal(rows(f"raw:s3://{bucket}/texts"), near)
    assert np.array_equal(rows(f"s3://{bucket}/texts/*"), near)
