"""The address at which a server listens: its socket, and the URLs under which it is reached."""

import errno
import socket
from collections.abc import Iterator

from nanochat.common import UserError, tr
from nanochat.data.library_words import os_problem


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens on `port` of `host`.

    A server calls this before its model loads, so that a port in use is reported at once. Raises
    UserError if `host` is not an address of this machine, or if `port` is taken or privileged.
    """
    try:
        infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except socket.gaierror as failure:
        advice = tr(
            "--host must be an address of this machine, got {host!r} ({reason}): leave "
            "it out for 127.0.0.1",
            host=host,
            reason=os_problem(failure),
        )
        raise UserError(advice) from None
    family, _, _, _, address = infos[0]
    try:
        return _bound(family, address)
    except OSError as failure:
        if failure.errno == errno.EADDRINUSE:
            free = next(_free_ports(family, address))
            advice = tr(
                "port {port} is taken by another program. Port {free} is free: add --port {free}",
                port=port,
                free=free,
            )
        elif failure.errno == errno.EACCES:
            advice = tr(
                "port {port} needs administrator rights: use a port from 1024 on, such as --port "
                "8000",
                port=port,
            )
        elif failure.errno == errno.EADDRNOTAVAIL:
            advice = tr(
                "--host must be an address of this machine, got {host}: leave it out for 127.0.0.1",
                host=host,
            )
        else:
            raise
        raise UserError(advice) from None


def _bound(family: int, address: tuple) -> socket.socket:
    """Return a socket that listens at an address, or raise OSError if that is not possible."""
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(128)
    except OSError:
        listener.close()
        raise
    return listener


def _free_ports(family: int, address: tuple) -> Iterator[int]:
    """Yield free ports just above that of `address`, then one that the system chooses."""
    host, port, *scope = address
    for candidate in (*range(port + 1, min(port + 100, 65535)), 0):
        try:
            with _bound(family, (host, candidate, *scope)) as listener:
                yield listener.getsockname()[1]
        except OSError:
            continue


def addresses(listener: socket.socket, host: str) -> list[str]:
    """Return a list of URLs at which the server can be reached."""
    port = listener.getsockname()[1]
    names = [f"[{host}]" if ":" in host else host]
    if host in ("0.0.0.0", "::", ""):  # every address of this machine
        names = ["127.0.0.1", socket.gethostname()]
    return [f"http://{name}:{port}" for name in names]
