"""The address a server is to listen on: whether it can be had, why not, and keeping it until the server has come up."""

from __future__ import annotations

import errno
import socket
from typing import Any

from scheduler.errors import SettingsError


class AddressInUse(SettingsError):
    """Somebody listens there already."""


def check_address(host: str, port: int) -> None:
    """Raises SettingsError, naming the setting that is to blame, when nothing can listen there; AddressInUse where one does."""
    try:
        family, _, _, _, address = _resolve(host, port)
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except (OSError, UnicodeError) as error:
        in_use = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
        raise (AddressInUse if in_use else SettingsError)(_why_not_listen(host, port, error)) from None


def _why_not_listen(host: str, port: int, error: OSError | UnicodeError) -> str:
    if isinstance(error, socket.gaierror | UnicodeError) or error.errno == errno.EADDRNOTAVAIL:
        return f"gateway.host: {host!r} is no address of this machine; set --host to 127.0.0.1, or 0.0.0.0 for all"
    if error.errno == errno.EADDRINUSE:
        return f"gateway.port: {port} on {host} is in use by another process; set another --port"
    if error.errno == errno.EACCES:
        return f"gateway.port: this user may not listen on {port}; set a --port from 1024 on"
    return f"gateway.port: cannot listen on {host}:{port}: {error.strerror or error}; set another --port"


def hold_address(host: str, port: int) -> socket.socket | None:
    """Bound and not listening, so that another server's check_address finds the address taken until this one has come up.
    Serve's proxies share ports on purpose: two servers begun at the same moment would both get half of the requests.

    None where that cannot be had: connections of a server without Ray that has just ended stand in its way for a minute.
    """
    family, _, _, _, address = _resolve(host, port)
    holder = socket.socket(family, socket.SOCK_STREAM)
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        holder.bind(address)
    except OSError:
        holder.close()
        return None
    return holder


def _resolve(host: str, port: int) -> tuple[socket.AddressFamily, socket.SocketKind, int, str, Any]:
    return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
