"""Where a driver may listen: what no other machine reaches, or this one cannot open, is reported at once."""

import socket

import pytest

from myriad.errors import BadInputError
from myriad.supervise.driver_address import check_listen, split_listen


@pytest.mark.parametrize(
    ("listen", "host", "port"),
    [
        ("127.0.0.1", "127.0.0.1", 0),
        ("10.0.0.7:7000", "10.0.0.7", 7000),
        ("node-7", "node-7", 0),
        ("node-7:80", "node-7", 80),
        ("fd00::7", "fd00::7", 0),
        ("[fd00::7]", "fd00::7", 0),
        ("[fd00::7]:7000", "fd00::7", 7000),
    ],
)
def test_hosts_and_ports_are_distinguished(listen: str, host: str, port: int) -> None:
    assert split_listen(listen) == (host, port)


@pytest.mark.parametrize(
    ("listen", "said"),
    [
        ("", "an address or a host name"),
        ("10.0.0.7:many", "an address or a host name"),
        ("10.0.0.7:70000", "an address or a host name"),
        ("0.0.0.0", "nodes must know one to connect to"),
        ("192.0.2.1", "no address of this machine"),
        ("no.such.host.invalid", "an address or a host name"),
    ],
)
def test_what_cannot_be_listened_at_is_refused_in_a_line(listen: str, said: str) -> None:
    with pytest.raises(BadInputError, match=said) as refused:
        check_listen(listen)
    assert refused.value.key == "resilience.listen" and "\n" not in str(refused.value)


def test_a_port_in_use_is_refused_and_a_free_one_is_left_free() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(BadInputError, match="another program listens"):
            check_listen(listen)
    check_listen(listen)
    check_listen(listen)


def test_a_name_that_means_loopback_on_its_own_machine_alone_is_refused(monkeypatch) -> None:
    """As Debian's installer writes it into /etc/hosts: no other machine would find the driver there."""
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *arguments, **options: found)
    with pytest.raises(BadInputError, match=r"127\.0\.1\.1"):
        check_listen("node-7")
