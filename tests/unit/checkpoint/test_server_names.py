"""If these fail, a run resumes from the memory of another run."""

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from myriad.checkpoint.snapshots.server_start import node_server_name, server_name


def test_a_run_that_is_removed_and_made_again_finds_no_server_of_the_one_before(tmp_path: Path) -> None:
    run = tmp_path / "run"
    names = []
    for _ in range(2):
        run.mkdir()
        names.append(node_server_name(run))
        assert node_server_name(run) == server_name(run) == names[-1], "one name for all attempts"
        shutil.rmtree(run)
    assert names[0] != names[1]


def test_ranks_that_look_for_a_server_at_once_agree_on_its_name(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(lambda _: node_server_name(tmp_path), range(32)))) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["id"]


def test_looking_for_a_server_writes_nothing(tmp_path: Path) -> None:
    server_name(tmp_path)
    assert not any(tmp_path.iterdir())
