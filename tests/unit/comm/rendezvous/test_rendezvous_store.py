"""Where rank 0 serves the store. If these fail, other hosts can write into it, or ranks cannot reach it."""

import socket

import pytest

from myriad.comm.config import CommConfig
from myriad.comm.free_port import free_port
from myriad.comm.rendezvous.rendezvous_store import _listen, open_store
from myriad.errors import RunFailedError


def answers(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), timeout=5).close()
    except OSError:
        return False
    return True


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> int:
    found = free_port()
    for name, value in {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(found),
        "LOCAL_WORLD_SIZE": "1",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    return found


def test_on_one_machine_only_the_address_of_the_ranks_answers(port: int) -> None:
    store = open_store(CommConfig(), 0, 1)
    store.set("key", "value")
    assert store.get("key") == b"value"
    assert answers("127.0.0.1", port) and not answers("127.0.0.2", port)


def test_a_port_in_use_is_an_error_in_one_line(port: int) -> None:
    with socket.create_server(("127.0.0.1", port)), pytest.raises(RunFailedError) as caught:
        open_store(CommConfig(), 0, 1)
    text = str(caught.value)
    assert text.startswith(f"rank 0: the store of rank 0 at 127.0.0.1:{port}: Address already in use")
    assert "\n" not in text


def test_a_name_that_does_not_resolve_is_an_error_in_one_line(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MASTER_ADDR", "nowhere.invalid")
    with pytest.raises(RunFailedError, match=rf"rank 0: the store of rank 0 at nowhere.invalid:{port}: "):
        open_store(CommConfig(), 0, 1)


@pytest.mark.parametrize(
    ("host", "is_one_machine"), [("own-name", False), ("192.0.2.1", False), ("192.0.2.1", True)]
)
def test_what_other_machines_know_by_another_address_listens_everywhere(
    host: str, is_one_machine: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Debian's address of the own name, and one that a network translates."""
    look_up = socket.getaddrinfo
    monkeypatch.setattr(
        socket,
        "getaddrinfo",
        lambda name, *rest, **how: look_up("127.0.1.1" if name == "own-name" else name, *rest, **how),
    )
    with _listen(host, free_port(), is_one_machine) as listener:
        assert listener.getsockname()[0] == "0.0.0.0"


def test_several_nodes_on_the_loopback_are_on_this_machine() -> None:
    with _listen("127.0.0.1", free_port(), is_one_machine=False) as listener:
        assert listener.getsockname()[0] == "127.0.0.1"


def test_with_several_machines_only_the_given_address_answers(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank of another machine connects to the name that it has been given."""
    own = next(
        (one for one in socket.gethostbyname_ex(socket.gethostname())[2] if not one.startswith("127.")), None
    )
    if own is None:
        pytest.skip("this machine has no address but the loopback")
    with _listen(own, free_port(own), is_one_machine=False) as listener:
        assert answers(own, listener.getsockname()[1]) and not answers("127.0.0.1", listener.getsockname()[1])
