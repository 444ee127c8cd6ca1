"""Where a driver listens: what the job says, checked before anything starts.

10.0.0.7        any free port        host7:7000, [fd00::7]:7000        that port
"""

import errno
import socket
from ipaddress import ip_address

from myriad.errors import BadInputError

__all__ = ["check_listen", "split_listen"]

_KEY = "resilience.listen"
_ALLOWED = "an address or a host name of this machine, as in 10.0.0.7 or 10.0.0.7:7000"


def split_listen(listen: str) -> tuple[str, int]:
    """Host and port; port 0: any. Raises `BadInputError`."""
    host, port = listen, ""
    if listen.startswith("["):
        host, _, port = listen[1:].partition("]")
        port = port.removeprefix(":")
    elif listen.count(":") == 1:
        host, _, port = listen.partition(":")
    if not host or (port and not (port.isascii() and port.isdigit() and int(port) < 2**16)):
        raise BadInputError(_KEY, listen, _ALLOWED)
    return host, int(port or 0)


def check_listen(listen: str) -> None:
    """Refuses what a driver could not listen at, or could not be reached at. Raises `BadInputError`."""
    host, port = split_listen(listen)
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise BadInputError(_KEY, listen, f"{_ALLOWED} ({error.strerror})") from None
    found = ip_address(str(address[0]).partition("%")[0])
    if found.is_unspecified:
        raise BadInputError(_KEY, listen, f"{_ALLOWED}: nodes must know one to connect to")
    if found.is_loopback and host not in (str(found), "localhost"):
        raise BadInputError(_KEY, listen, f"means {found} here, which no other machine reaches: an address")
    _bind(listen, family, address)


def _bind(listen: str, family: socket.AddressFamily, address: tuple[object, ...]) -> None:
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
            probe.listen()
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise BadInputError(_KEY, listen, "another program listens at this port") from None
            why = "no address of this machine" if error.errno == errno.EADDRNOTAVAIL else error.strerror
            raise BadInputError(_KEY, listen, f"{_ALLOWED} ({why})") from None
