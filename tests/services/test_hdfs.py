"""HDFS through WebHDFS: what was saved there must bring a run back bit for bit, a corpus must give the tokens
that were written, and whatever a name node or a data node does wrong must be tried again or be one line."""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from same_run import tensors_at
from watched_runs import events, make_run, train, wait_for_snapshot_server_to_end

from myriad.checkpoint.storage.checkpoint_folder import CheckpointFolder
from myriad.checkpoint.storage.storage_backends import Storage, open_storage
from myriad.data.bad_blocks import BadBlockError, BlockGuard
from myriad.data.config import DataConfig
from myriad.data.corpus import Corpora, read_batch
from myriad.data.corpus_opening import open_corpora
from myriad.data.prepare import PrepareOptions, prepare
from myriad.errors import BadInputError, RunFailedError

if TYPE_CHECKING:
    from hdfs_server import HdfsServer

SEQUENCE = 32


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, hdfs: "HdfsServer") -> Iterator[None]:
    """Pauses between tries are for servers of others. Faults end with their test."""
    from myriad.data import range_input
    from myriad.system import webhdfs

    monkeypatch.setattr(webhdfs, "_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(range_input, "_PAUSE_SECONDS", 0.01)
    yield
    hdfs.clear()


@pytest.fixture
def storage(hdfs: "HdfsServer", request: pytest.FixtureRequest) -> Storage:
    return open_storage(f"hdfs://cluster/{request.node.name}")


def test_a_run_continues_from_hdfs_to_the_bits_that_it_had(tmp_path: Path, corpus: Path, hdfs: "HdfsServer"):
    """Its corpus lies there too. The last checkpoint is damaged there: it is set aside, by a rename."""
    hdfs.upload(corpus, "/corpus")
    keys = ["data.corpus=hdfs://cluster/corpus", f"data.cache={tmp_path / 'cache'}", "train.steps=6",
            "checkpoint.every=3", "checkpoint.keep=9", "checkpoint.linger_seconds=0"]  # fmt: skip
    run = make_run(tmp_path / "run", corpus, *keys, "checkpoint.url=hdfs://cluster/runs/first #1")
    assert train(run) == [0]
    losses, tensors = [line["loss"] for line in run.read_metrics()], tensors_at(run, 6)
    asked = hdfs.requests()
    assert {user for *_, user in asked} == {"trainer"} and not list(run.checkpoints_path.iterdir())
    assert {op for node, _, op, *_ in asked if node == "data"} == {"OPEN", "CREATE"}
    hdfs.flip("/runs/first #1/step-6/__0_0.distcp", 1000)
    wait_for_snapshot_server_to_end(run)  # or the run resumes from memory
    assert train(run) == [0]
    assert [event["step"] for event in events(run, "resume")] == [3]
    assert CheckpointFolder(run.checkpoints()).damaged() == [6]
    assert [line["loss"] for line in run.read_metrics()] == losses
    for name, tensor in tensors_at(run, 6).items():
        np.testing.assert_array_equal(tensor, tensors[name], err_msg=name)


def test_files_and_folders_are_as_on_a_disk(storage: Storage, monkeypatch: pytest.MonkeyPatch):
    from myriad.checkpoint.storage import storage_backends as module

    monkeypatch.setattr(module, "_UPLOAD_BYTES", 2**18)  # several parts of one upload
    content = bytes(range(256)) * 3000
    with storage.create("step-1/data %20#?.bin") as sink:
        sink.write(content)
    with storage.create("step-1/empty"):
        pass
    assert storage.size("step-1/data %20#?.bin") == len(content) and storage.size("nothing") is None
    assert storage.names("step-1") == ["data %20#?.bin", "empty"] and storage.names("nothing") == []
    into = bytearray(1000)
    assert storage.read_into("step-1/data %20#?.bin", 300_001, memoryview(into)) == 1000
    assert bytes(into) == content[300_001:301_001] and storage.read("step-1/data %20#?.bin") == content
    storage.put("note", b"1")
    storage.put("note", b"22")
    storage.rename("step-1", "step-1.damaged")
    assert storage.names() == ["note", "step-1.damaged"] and storage.read("note") == b"22"
    storage.remove("step-1.damaged")
    storage.remove("step-1.damaged")
    assert storage.names() == ["note"]


@pytest.mark.parametrize(
    "fault", [("name", "OPEN", "standby"), ("data", "OPEN", "short"), ("data", "OPEN", "away")]
)
def test_a_read_that_fails_once_is_made_again(
    storage: Storage, hdfs: "HdfsServer", fault: tuple[str, str, str]
):
    storage.put("file", b"content")
    hdfs.requests()
    hdfs.fail(*fault)
    assert storage.read("file") == b"content"
    assert sum(op == "OPEN" for _, _, op, *_ in hdfs.requests()) >= 3


@pytest.mark.parametrize(
    ("node", "op", "how", "told"),
    [
        ("data", "OPEN", "error", "IOException: the disk of the data node failed at java"),
        ("name", "OPEN", "denied", "Permission denied: user=nobody"),
        ("data", "OPEN", "short", "cannot be reached|of 7 bytes|IncompleteRead"),
        ("name", "OPEN", "standby", "StandbyException: Operation category READ"),
    ],
)
def test_what_stays_wrong_is_one_line(
    storage: Storage, hdfs: "HdfsServer", node: str, op: str, how: str, told: str
):
    storage.put("file", b"content")
    hdfs.fail(node, op, how, 50)
    with pytest.raises(OSError, match=told) as error:
        storage.read("file")
    assert "\n" not in str(error.value)


def test_another_name_node_is_asked_and_a_token_takes_the_place_of_a_user(
    hdfs: "HdfsServer", monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("MYRIAD_WEBHDFS", f"http://127.0.0.1:1, {hdfs.url}")
    monkeypatch.setenv("MYRIAD_HDFS_TOKEN", "secret-token")
    storage = open_storage("hdfs://cluster/tokens")
    hdfs.requests()
    storage.put("file", b"1")
    assert {user for *_, user in hdfs.requests()} == {"secret-token"}


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory, hdfs: "HdfsServer") -> Path:
    """A corpus of several blocks, prepared from text that lies on HDFS, and a copy of it there."""
    folder = tmp_path_factory.mktemp("texts")
    (folder / "in").mkdir()
    source = "\n".join(f"line {number} of {number * number}" for number in range(40_000))
    (folder / "in" / "a.txt").write_text(source)
    hdfs.upload(folder / "in", "/texts")
    options = PrepareOptions(vocabulary=300, validation=0.05)
    prepare(["hdfs://cluster/texts"], folder / "corpus", options)
    hdfs.upload(folder / "corpus", "/corpus-of-blocks")
    return folder / "corpus"


def remote(cache: Path, guard: BlockGuard | None = None, **keys: object) -> Corpora:
    data = DataConfig(corpus="hdfs://cluster/corpus-of-blocks", cache=str(cache), **keys)
    return open_corpora(data, SEQUENCE, guard=guard)


def batch(corpora: Corpora, rows: int = 64) -> np.ndarray:
    return read_batch(corpora, corpora.sampler(1), range(rows))


def test_a_corpus_there_gives_the_same_batches_and_is_fetched_once(
    texts: Path, hdfs: "HdfsServer", tmp_path: Path
):
    local = open_corpora(DataConfig(corpus=str(texts)), SEQUENCE)
    hdfs.requests()
    opened = remote(tmp_path)
    assert opened.content == local.content and opened.fingerprint == local.fingerprint
    assert np.array_equal(batch(opened), batch(local))
    read = [path for node, _, op, path, *_ in hdfs.requests() if (node, op) == ("data", "OPEN")]
    num_blocks = sum(path.endswith(".bin") for path in read)
    assert 1 < num_blocks <= -(-(texts / "train-00000.bin").stat().st_size // 2**16)
    assert np.array_equal(batch(remote(tmp_path)), batch(local)), "from the cache"
    assert not any(path.endswith(".bin") for _, _, _, path, *_ in hdfs.requests())
    small = remote(tmp_path, cache_bytes=2**17)
    assert np.array_equal(batch(small), batch(local)), "two slots for all blocks"
    [slots] = tmp_path.glob("*/blocks-2")
    assert slots.stat().st_size <= 2**17


def test_neither_the_cache_nor_a_data_node_is_trusted(texts: Path, hdfs: "HdfsServer", tmp_path: Path):
    local, told = open_corpora(DataConfig(corpus=str(texts)), SEQUENCE), list[str]()
    expected = batch(local)
    batch(remote(tmp_path))
    [slots] = tmp_path.glob("*/blocks-*")
    slots.write_bytes(bytes(byte ^ 1 for byte in slots.read_bytes()))
    guard = BlockGuard(report=lambda event, fields: told.append(event))
    hdfs.fail("data", "OPEN", "flip", 1)  # the manifest is read again
    opened = remote(tmp_path, guard)
    for how in ("flip", "away"):
        hdfs.requests()
        hdfs.fail("data", "OPEN", how, 2)
        assert np.array_equal(batch(opened), expected), how
        assert any(path.endswith(".bin") for _, _, _, path, *_ in hdfs.requests()), "nothing of it was used"
        slots.write_bytes(bytes(slots.stat().st_size))
    assert "bad_block" not in told


def test_a_block_that_is_bad_there_is_named_with_its_url_and_byte(
    texts: Path, hdfs: "HdfsServer", tmp_path: Path
):
    hdfs.upload(texts, "/corpus-of-blocks")
    hdfs.flip("/corpus-of-blocks/train-00000.bin", 70_000)
    try:
        with pytest.raises(
            BadBlockError, match=r"hdfs://cluster/corpus-of-blocks/train-00000\.bin: the 65536 bytes"
        ):
            batch(remote(tmp_path), 400)
        skipping = remote(tmp_path, BlockGuard("skip", 1))
        assert batch(skipping, 400).shape == (400, SEQUENCE + 1)
    finally:
        hdfs.upload(texts, "/corpus-of-blocks")


def test_a_corpus_without_hashes_and_megatrons_files_are_read_there(
    texts: Path, hdfs: "HdfsServer", tmp_path: Path
):
    from tiny_corpora import drop_blocks

    expected = batch(open_corpora(DataConfig(corpus=str(texts)), SEQUENCE))
    plain = tmp_path / "plain"
    shutil.copytree(texts, plain)
    hdfs.upload(plain, "/megatron")
    hdfs.upload(drop_blocks(plain), "/plain")
    for name, unchecked in (("plain", True), ("megatron/train-00000", False)):
        data = DataConfig(corpus=f"hdfs://cluster/{name}", cache=str(tmp_path / "cache"))
        opened = open_corpora(data, SEQUENCE)
        assert np.array_equal(batch(opened), expected), name
        assert bool(opened.unchecked) == unchecked
    hdfs.fail("data", "OPEN", "error", 50)
    with pytest.raises(BadInputError, match=r"cannot be read: .*IOException"):
        open_corpora(data, SEQUENCE)
    hdfs.clear()
    with pytest.raises(BadInputError, match=r"no manifest\.json in it"):
        open_corpora(DataConfig(corpus="hdfs://cluster/nothing", cache=str(tmp_path)), SEQUENCE)


def test_storage_that_stays_away_is_no_bad_block(texts: Path, hdfs: "HdfsServer", tmp_path: Path):
    opened = remote(tmp_path, BlockGuard("skip", 9))
    opened.corpora[0].read(0, np.empty(4, np.int32))
    hdfs.fail("data", "OPEN", "error", 500)
    with pytest.raises(RunFailedError, match=r"train-00000\.bin, byte \d+: cannot be read") as error:
        batch(opened)
    assert not isinstance(error.value, BadBlockError)


def test_a_cluster_that_is_not_there_is_refused_in_one_line(tmp_path: Path, corpus: Path, hdfs: "HdfsServer"):
    url = "webhdfs://127.0.0.1:1/x"
    keys = ["--data.corpus", str(corpus), "--checkpoint.url", url, "--run", str(tmp_path / "run")]
    command = [sys.executable, "-m", "myriad.cli.main", "train", "tiny", *keys]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    [line] = done.stderr.strip().splitlines()
    assert done.returncode == 2 and f'checkpoint.url = "{url}": ' in line and "cannot be reached" in line
    assert not (tmp_path / "run").exists()
    with pytest.raises(BadInputError, match=r"data\.corpus = .*127\.0\.0\.1:1 cannot be reached"):
        open_corpora(DataConfig(corpus=url, cache=str(tmp_path / "cache")), SEQUENCE)
