"""If these fail, a kill while preparing costs the work done, or leaves what is taken for a corpus."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tiny_corpora import lines, options

from myriad.data.block_hashes import verify_corpus
from myriad.data.corpus_opening import open_corpus
from myriad.data.prepare import prepare
from myriad.errors import BadInputError

RUN = """
import sys
import time
from pathlib import Path
from myriad.data import prepare as module, tokenize_pieces as pieces
from myriad.data.prepare import PrepareOptions, prepare
whole_piece = pieces._tokenize
def slow_piece(*arguments):  # time to be killed in
    time.sleep(0.1)
    return whole_piece(*arguments)
pieces._tokenize = slow_piece
if __name__ == "__main__":
    module._PIECE_BYTES = 1 << 15
    options = PrepareOptions(vocabulary=300, validation=0.2, shard_bytes=1 << 17, workers=int(sys.argv[3]))
    prepare([sys.argv[1]], Path(sys.argv[2]), options)
"""


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("source") / "a.jsonl"
    path.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines(4_000)))
    return path


def start(script: Path, source: Path, output: Path, workers: int) -> subprocess.Popen[bytes]:
    script.write_text(RUN)
    return subprocess.Popen([sys.executable, str(script), str(source), str(output), str(workers)])


def children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(child) for child in tasks.read_text().split()] if tasks.exists() else []


def pieces_done(output: Path) -> int:
    return len(list((output / ".prepare").glob("0*.json")))


def wait_for(what: object, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 60
    while not what() and process.poll() is None:
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.005)


def test_killed_again_and_again_it_ends_with_the_same_bytes(tmp_path: Path, source: Path) -> None:
    script = tmp_path / "run.py"
    assert start(script, source, tmp_path / "whole", 2).wait(120) == 0
    whole, output = content(tmp_path / "whole"), tmp_path / "out"
    kills = 0
    for target in (0, 3, 6, 9):
        process = start(script, source, output, 2)
        wait_for(lambda target=target: pieces_done(output) > target, process)
        workers = children(process.pid)
        process.send_signal(signal.SIGKILL)
        kills += process.wait(30) == -signal.SIGKILL
        with pytest.raises(BadInputError, match=r"no manifest\.json"):
            open_corpus(str(output), "train")
        for worker in workers:  # they end by themselves
            wait_for(lambda worker=worker: not os.path.exists(f"/proc/{worker}"), process)
    assert kills == 4
    done = {path.name: path.stat().st_mtime_ns for path in (output / ".prepare").glob("0*.json")}
    assert len(done) >= 4
    assert start(script, source, output, 1).wait(120) == 0
    assert content(output) == whole
    assert verify_corpus(output) == []


def test_the_number_of_workers_changes_nothing(tmp_path: Path, source: Path) -> None:
    folders = [tmp_path / "one", tmp_path / "three"]
    for folder, workers in zip(folders, (1, 3), strict=True):
        assert start(tmp_path / "run.py", source, folder, workers).wait(120) == 0
    assert content(folders[0]) == content(folders[1])


def test_an_error_in_a_worker_process_is_reported_unchanged(tmp_path: Path, source: Path) -> None:
    broken = tmp_path / "b.jsonl"
    broken.write_text(source.read_text() * 2 + "broken\n")
    with pytest.raises(
        BadInputError, match=rf"b\.jsonl.*line at byte {broken.stat().st_size - 7} is not JSON"
    ):
        prepare([str(broken)], tmp_path / "out", options(workers=2))


def test_two_at_once_do_not_write_over_each_other(tmp_path: Path, source: Path) -> None:
    output = tmp_path / "out"
    process = start(tmp_path / "run.py", source, output, 1)
    wait_for(lambda: pieces_done(output), process)
    if process.poll() is None:
        with pytest.raises(BadInputError, match="another process"):
            prepare([str(source)], output, options())
    assert process.wait(120) == 0
    assert verify_corpus(output) == []
