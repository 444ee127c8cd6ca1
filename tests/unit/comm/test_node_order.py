"""If these fail, ranks of a planned order meet in another one, or two processes believe to be the same
rank."""

import pytest

from myriad.comm.config import CommConfig
from myriad.comm.node_order import grid_rank
from myriad.errors import BadInputError
from myriad.job import load_job

THREE = CommConfig(node_order=(2, 0, 1))


def _launched(monkeypatch: pytest.MonkeyPatch, rank: int, local_rank: int, local_world: int) -> None:
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("LOCAL_RANK", str(local_rank))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(local_world))


def test_the_grid_fills_nodes_in_the_order_of_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for rank in range(6):
        _launched(monkeypatch, rank, rank % 2, 2)
        found.append(grid_rank(THREE, 6))
    assert found == [2, 3, 4, 5, 0, 1]


def test_on_one_machine_and_without_an_order_ranks_are_the_launchers(monkeypatch: pytest.MonkeyPatch) -> None:
    _launched(monkeypatch, 4, 4, 6)
    assert grid_rank(THREE, 6) == 4
    _launched(monkeypatch, 4, 0, 2)
    assert grid_rank(CommConfig(), 6) == 4


@pytest.mark.parametrize(
    ("place", "words"),
    [((2, 0, 1), "3 nodes of 2 ranks; the launcher made one of 1"), ((3, 0, 2), "numbered node by node")],
)
def test_another_launchers_nodes_are_refused_in_one_line(
    place: tuple[int, int, int], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _launched(monkeypatch, *place)
    with pytest.raises(BadInputError, match=words) as caught:
        grid_rank(THREE, 6)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("order", "words"),
    [
        ("[0, 2]", r"\"\.\.\. 2 \.\.\.\": each of the 2 nodes once, 0 to 1"),
        ("[1, 1, 0, 3]", "1 is listed twice, 2 is missing"),
        ("[0, 1, 2]", "comm.node_order = 3: as many nodes as divide the 4 ranks"),
        ("[]", "comm.node_order = 0: as many nodes"),
        ("[0, -1]", "0 to 1"),
        ("n0", 'comm.node_order = "n0"'),
    ],
)
def test_what_is_no_order_of_nodes_is_refused_with_the_job(order: str, words: str) -> None:
    with pytest.raises(BadInputError, match=words):
        load_job("tiny", ["layout.dp=4", f"comm.node_order={order}"])
