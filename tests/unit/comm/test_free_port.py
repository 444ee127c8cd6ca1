"""If these fail, ranks rendezvous at a port that another program has taken meanwhile, or at none."""

import socket
from pathlib import Path

import pytest

from myriad.comm import free_port as ports
from myriad.comm.free_port import free_port


def test_a_free_port_is_outside_the_ephemeral_range(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = tmp_path / "range"
    given.write_text("20003\t60999\n")
    monkeypatch.setattr(ports, "_EPHEMERAL_RANGE", given)
    assert {free_port() for _ in range(30)} <= {20_000, 20_001, 20_002}


def test_a_port_that_someone_listens_on_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    first = free_port()
    with socket.create_server(("127.0.0.1", first)):
        monkeypatch.setattr(ports, "_FIRST", first)
        monkeypatch.setattr(ports, "_END", first + 3)
        assert all(free_port() != first for _ in range(20))


@pytest.mark.parametrize("given", ["1024 65535", "", None])
def test_the_memory_nodes_default_to_one_with_all_cores(
    given: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ports, "_EPHEMERAL_RANGE", tmp_path / "range")
    if given is not None:
        (tmp_path / "range").write_text(given)
    with socket.create_server(("127.0.0.1", free_port())) as server:
        assert server.getsockname()[1] > 0


def test_an_address_of_another_machine_has_none() -> None:
    with pytest.raises(OSError, match="assign"):
        free_port("192.0.2.1")
