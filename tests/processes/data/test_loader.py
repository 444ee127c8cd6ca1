"""If these fail, a killed loader loses or repeats a batch, a rank waits for ever, or a loader outlives it."""

import os
import shutil
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tiny_corpora import make_corpus

from myriad.data.config import CorpusShare, DataConfig
from myriad.data.corpus import read_batch
from myriad.data.corpus_opening import open_corpora
from myriad.data.loader import LoaderClient, LoaderSpec
from myriad.data.sampler import DataPosition
from myriad.errors import RunFailedError
from myriad.system.processes import process_state

SEQUENCE, BATCH, SEED = 16, 12, 5


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture
def spec(corpus: Path, request: pytest.FixtureRequest) -> LoaderSpec:
    return LoaderSpec(
        name=f"{os.getpid()}-{request.node.name}",
        data=DataConfig(corpus=str(corpus)),
        sequence=SEQUENCE,
        global_batch=BATCH,
        seed=SEED,
        rows=((0, 4), (8, 12)),
    )


def expected(spec: LoaderSpec, step: int, first_sample: int = 0) -> np.ndarray:
    opened = open_corpora(spec.data, SEQUENCE, spec.split)
    sampler = opened.sampler(SEED)
    first = first_sample + step * BATCH
    rows = [range(first + start, first + stop) for start, stop in spec.rows]
    return np.concatenate([read_batch(opened, sampler, samples) for samples in rows])


def loader_pid(client: LoaderClient) -> int:
    assert client.loader_pid is not None
    return client.loader_pid


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until_gone(pid: int) -> None:
    deadline = time.monotonic() + 30
    while is_running(pid):
        assert time.monotonic() < deadline, f"process {pid} is still there"
        time.sleep(0.01)


def test_any_step_in_any_order_is_the_batch_of_that_step(spec: LoaderSpec) -> None:
    with LoaderClient(spec, first_step=3) as client:
        for step in (3, 4, 5, 0, 1, 10**9, 10**9 + 1, 4):
            assert np.array_equal(client.get(step), expected(spec, step))
        assert np.array_equal(client.rows(7, 9, 11), expected(spec, 7)[5:7])
        pid = loader_pid(client)
    assert not is_running(pid)


def test_a_run_whose_batch_has_changed_continues_with_the_sample_that_follows(spec: LoaderSpec) -> None:
    """Step 1 was reached with batches of 5: nothing that was prepared before it was known may be used."""
    with LoaderClient(spec, first_step=None) as client:
        client.begin(1, DataPosition.of(BATCH).resumed(step=1, samples=5))
        for step in (1, 2, 3):
            assert np.array_equal(client.get(step), expected(spec, step, 5 - BATCH)), step
        os.kill(loader_pid(client), signal.SIGKILL)
        for step in (4, 5, 6, 7):
            assert np.array_equal(client.get(step), expected(spec, step, 5 - BATCH)), step


def test_the_loader_never_imports_torch(spec: LoaderSpec) -> None:
    with LoaderClient(spec) as client:
        client.get(0)
        maps = Path(f"/proc/{loader_pid(client)}/maps").read_text()
        assert "torch" not in maps and "numpy" in maps


def test_a_killed_loader_is_replaced_and_nothing_is_lost_or_repeated(spec: LoaderSpec) -> None:
    with LoaderClient(spec) as client:
        pids = set()
        for step in range(40):
            assert np.array_equal(client.get(step), expected(spec, step)), step
            if step % 10 == 5:
                pids.add(loader_pid(client))
                os.kill(loader_pid(client), signal.SIGKILL)
        assert len(pids) == 4 and client.restarts >= 3


def test_a_stopped_loader_is_replaced_and_no_rank_waits_for_ever(spec: LoaderSpec) -> None:
    with LoaderClient(spec) as client:
        client.get(0)
        stopped = loader_pid(client)
        os.kill(stopped, signal.SIGSTOP)
        for step in range(1, 12):
            assert np.array_equal(client.get(step), expected(spec, step)), step
        assert client.restarts == 1 and not is_running(stopped)


def test_a_hung_loader_is_replaced_and_no_rank_is_restarted_for_it(spec: LoaderSpec) -> None:
    told: list[str] = []
    with LoaderClient(spec, on_restart=told.append, patience=0.2) as client:
        client.get(0)
        hung = loader_pid(client)
        command = [sys.executable, "-m", "myriad.faults.freeze", str(hung), str(os.getpid())]
        with subprocess.Popen(command) as freezer:
            while process_state(hung) != "t":
                assert freezer.poll() is None, "this machine does not let a process be traced"
            for step in range(1, 12):
                assert np.array_equal(client.get(step), expected(spec, step)), step
        assert client.restarts == 1 and not is_running(hung)
        assert len(told) == 1 and "did nothing for 1 s while a rank waited and was killed" in told[0]


def test_a_slow_loader_is_waited_for(spec: LoaderSpec) -> None:
    """It has a tenth of the time: it is stopped 100 ms in each 110 ms, and so whenever it is looked at."""
    with LoaderClient(spec, patience=0.3) as client:
        client.get(0)
        command = [
            sys.executable,
            "-m",
            "myriad.faults.slow_process",
            str(loader_pid(client)),
            "0.11",
            "0.1",
        ]
        with subprocess.Popen([*command, str(os.getpid())]) as slower:
            for step in range(1, 8):
                assert np.array_equal(client.get(10**6 * step), expected(spec, 10**6 * step)), step
            assert slower.poll() is None
            slower.terminate()
        assert client.restarts == 0


def test_a_loader_killed_before_its_first_batch_is_replaced(spec: LoaderSpec) -> None:
    with LoaderClient(spec) as client:
        os.kill(loader_pid(client), signal.SIGKILL)
        assert np.array_equal(client.get(0), expected(spec, 0))


RANK = """
import sys, zlib
from myriad.data.loader import LoaderClient, LoaderSpec
rank, ranks, steps = map(int, sys.argv[1:4])
with LoaderClient(LoaderSpec.model_validate_json(sys.argv[4]), rank, ranks) as client:
    for step in range(steps):
        print(step, zlib.crc32(client.get(step).tobytes()), flush=True)
        if sys.argv[5:] and step == 2:
            print(client.loader_pid, flush=True)
            sys.stdin.read()
    sys.stdin.read()
"""


def start_rank(
    spec: LoaderSpec, rank: int, ranks: int, *arguments: str, steps: int = 60
) -> subprocess.Popen[str]:
    command = [
        sys.executable,
        "-c",
        RANK,
        str(rank),
        str(ranks),
        str(steps),
        spec.model_dump_json(),
        *arguments,
    ]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[str]]]:
    processes: list[subprocess.Popen[str]] = []
    yield processes
    for process in processes:
        process.kill()
        process.communicate(timeout=30)


def test_all_ranks_of_a_node_read_the_same_bytes_while_the_loader_is_killed(
    spec: LoaderSpec, started: list[subprocess.Popen[str]]
) -> None:
    with LoaderClient(spec, 0, 3) as client:
        started += [start_rank(spec, rank, 3) for rank in (2, 1)]
        lines = []
        for step in range(60):
            batch = client.get(step)
            lines.append(f"{step} {zlib.crc32(batch.tobytes())}\n")
            if step in (20, 40):
                os.kill(loader_pid(client), signal.SIGKILL)
        for process in started:
            assert process.stdout is not None
            assert [process.stdout.readline() for _ in range(60)] == lines
        for process in started:
            process.communicate("", timeout=30)
            assert process.returncode == 0


def test_when_the_owner_dies_the_loader_ends_and_the_others_are_notified(
    spec: LoaderSpec, started: list[subprocess.Popen[str]]
) -> None:
    started.append(start_rank(spec, 0, 2, "stop"))
    client = LoaderClient(spec, 1, 2)
    client.get(0)
    client.get(1)
    client.get(2)
    assert started[0].stdout is not None
    pid = int([started[0].stdout.readline() for _ in range(4)][-1])
    started[0].kill()
    started[0].wait(30)
    wait_until_gone(pid)
    with pytest.raises(RunFailedError, match="rank that owns it has exited"):
        client.get(10)


def test_nothing_is_left_in_shared_memory_however_a_run_ends(
    spec: LoaderSpec, started: list[subprocess.Popen[str]]
) -> None:
    started.append(start_rank(spec, 0, 1, "stop"))
    assert started[0].stdout is not None
    pid = int([started[0].stdout.readline() for _ in range(4)][-1])
    rings = [line for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if "myriad-loader-" in line]
    assert rings and all(line.endswith("(deleted)") for line in rings)  # only the mappings keep it
    started[0].kill()
    wait_until_gone(pid)


def test_a_corrupt_shard_reaches_the_rank_as_the_reason(tmp_path: Path, spec: LoaderSpec) -> None:
    corpus = make_corpus(tmp_path)
    path = corpus / "train-00000.bin"
    path.write_bytes(b"\xff" * path.stat().st_size)
    broken = spec.model_copy(update={"data": DataConfig(corpus=str(corpus))})
    with LoaderClient(broken) as client:
        for _ in range(2):
            with pytest.raises(RunFailedError, match="train-00000"):
                client.get(0)
        assert client.restarts == 0


def test_a_shard_that_shrinks_under_the_loader_is_named(tmp_path: Path, spec: LoaderSpec) -> None:
    corpus = make_corpus(tmp_path, count=400)
    other = spec.model_copy(update={"data": DataConfig(corpus=str(corpus))})
    with LoaderClient(other) as client:
        client.get(0)
        os.truncate(corpus / "train-00000.bin", 0)
        with pytest.raises(RunFailedError, match=r"train-00000\.bin has 0 bytes"):
            for step in range(1, 10):
                client.get(step)


def test_a_corpus_that_is_replaced_under_a_run_is_never_read_silently(
    tmp_path: Path, spec: LoaderSpec
) -> None:
    """The mapping keeps the files that were replaced; a loader that takes over would read the new ones."""
    corpus = make_corpus(tmp_path, count=400)
    data = DataConfig(corpus=str(corpus))
    content = open_corpora(data, SEQUENCE).content
    shutil.copytree(corpus, tmp_path / "kept")
    with LoaderClient(spec.model_copy(update={"data": data, "content": content})) as client:
        client.get(0)
        shutil.rmtree(corpus)
        make_corpus(tmp_path, count=400, seed=9)
        assert open_corpora(data, SEQUENCE).content != content
        kept = spec.model_copy(update={"data": DataConfig(corpus=str(tmp_path / "kept"))})
        for step in range(1, 9):
            assert np.array_equal(client.get(step), expected(kept, step)), "as if nothing had happened"
        os.kill(loader_pid(client), signal.SIGKILL)
        with pytest.raises(
            RunFailedError, match="the corpus that this run began to read: its files were rep"
        ):
            for step in range(9, 20):
                client.get(step)


def test_a_loader_that_cannot_live_is_not_started_for_ever(
    spec: LoaderSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("myriad.data.loader.sys.executable", "/bin/false")
    with LoaderClient(spec) as client:
        with pytest.raises(
            RunFailedError, match=r"died 4 times without preparing a step, the last one died \(exit code 1\)"
        ):
            client.get(0)


def test_held_out_text_and_mixtures_go_through_the_loader(corpus: Path, spec: LoaderSpec) -> None:
    mixed = DataConfig(
        mixture=(CorpusShare(path=str(corpus), weight=2), CorpusShare(path=str(corpus), weight=1))
    )
    for changes in ({"split": "validation"}, {"data": mixed}):
        changed = spec.model_copy(update=changes)
        with LoaderClient(changed) as client:
            assert np.array_equal(client.get(1), expected(changed, 1))
