"""Connections between the processes of different hosts, which show that a process or its host is lost.

A process that is stopped, or holds the GIL for minutes, does not count as lost: the kernel of its host answers.
"""

from __future__ import annotations

import contextlib
import secrets
import selectors
import socket
import threading
from collections.abc import Callable

_SILENCE_S = 25  # of a host, after which it counts as lost; longer than the 15 s of `trainwright launch`
_PROBE_S = 5  # between two probes of the kernel
_POLL_S = 0.5
_TOKEN_BYTES = 16  # hexadecimal digits
_RANK_BYTES = 4


class HostLinks:
    """Connections of rank 0 to the ranks on other hosts, or the one connection of such a rank to rank 0.

    A thread waits for the end of each connection. After a greeting, which is a token and the rank, nothing is sent
    except by the kernels of the hosts.

    Args:
        on_loss: called in that thread with the rank at the other end, and True if its host cannot be reached, or False
            if its process has ended or has closed the connection.
    """

    def __init__(self, on_loss: Callable[[int, bool], None]) -> None:
        self._on_loss = on_loss
        # Each socket is registered with the rank at the other end, or None for the server and during the greeting.
        self._selector = selectors.DefaultSelector()
        self._greetings: dict[socket.socket, bytes] = {}  # received parts of incomplete greetings
        self._token = b""  # set by `listen` on rank 0, which closes connections of other programs
        self._is_closed = False
        self._thread = threading.Thread(target=self._wait, name="trainwright-host-links", daemon=True)

    def listen(self) -> str:
        """Start to accept connections. Return the port and the token for `connect`."""
        self._token = secrets.token_hex(_TOKEN_BYTES // 2).encode()
        if socket.has_dualstack_ipv6():
            server = socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
        else:
            server = socket.create_server(("", 0))
        server.setblocking(False)
        self._selector.register(server, selectors.EVENT_READ, None)
        self._thread.start()
        return f"{server.getsockname()[1]} {self._token.decode()}"

    def connect(self, host: str, address: str, rank: int) -> bool:
        """Connect this rank to rank 0. Return False if that fails, for example because a firewall blocks the port.

        Args:
            host: the host of rank 0.
            address: the result of `listen` on rank 0.
            rank: this rank.
        """
        port, token = address.split()
        try:
            connection = socket.create_connection((host, int(port)), timeout=_PROBE_S)
        except OSError:
            return False
        try:
            connection.sendall(token.encode() + rank.to_bytes(_RANK_BYTES, "big"))
            self._add(connection, 0)
        except OSError:
            connection.close()
            return False
        self._thread.start()
        return True

    def close(self) -> None:
        """Close all connections."""
        self._is_closed = True
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(2 * _POLL_S)

    # The thread

    def _wait(self) -> None:
        while not self._is_closed:
            for key, _ in self._selector.select(_POLL_S):
                readable = key.fileobj
                assert isinstance(readable, socket.socket)  # only sockets are registered
                if readable in self._greetings:
                    self._read_greeting(readable)
                elif key.data is None:
                    self._accept(readable)
                else:
                    self._check_end(readable, key.data)
        for key in list(self._selector.get_map().values()):
            assert isinstance(key.fileobj, socket.socket)
            # Workers of a DataLoader have copies of the socket, so that closing it here would not end the connection.
            with contextlib.suppress(OSError):
                key.fileobj.shutdown(socket.SHUT_RDWR)
            key.fileobj.close()
        self._selector.close()

    def _accept(self, server: socket.socket) -> None:
        with contextlib.suppress(OSError):  # the connection has ended already
            connection, _ = server.accept()
            self._add(connection, None)
            self._greetings[connection] = b""

    def _read_greeting(self, connection: socket.socket) -> None:
        """Read the token and the rank of a connection. Close a connection of another program."""
        greeting = self._greetings[connection]
        num_missing = _TOKEN_BYTES + _RANK_BYTES - len(greeting)
        try:
            received = connection.recv(num_missing)
        except BlockingIOError:  # the connection was reported as readable without data
            return
        except OSError:
            received = b""
        greeting += received
        if received and len(received) < num_missing:
            self._greetings[connection] = greeting
            return
        del self._greetings[connection]
        is_complete = len(received) == num_missing
        if is_complete and greeting.startswith(self._token):
            rank = int.from_bytes(greeting[_TOKEN_BYTES:], "big")
            self._selector.modify(connection, selectors.EVENT_READ, rank)
        else:
            self._close_connection(connection)

    def _check_end(self, connection: socket.socket, rank: int) -> None:
        """Report the end of a connection."""
        try:
            if connection.recv(1):  # empty at the end of a connection
                return
            is_unreachable = False
        except BlockingIOError:  # the connection was reported as readable without data
            return
        except ConnectionResetError:
            is_unreachable = False
        except OSError:  # ETIMEDOUT, EHOSTUNREACH, ENETUNREACH
            is_unreachable = True
        self._close_connection(connection)
        if not self._is_closed:
            self._on_loss(rank, is_unreachable)

    def _close_connection(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        connection.close()

    def _add(self, connection: socket.socket, rank: int | None) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        # Names of Linux; macOS has other ones for some. TCP_USER_TIMEOUT replaces the number of probes.
        options = {
            "TCP_KEEPIDLE": _PROBE_S,
            "TCP_KEEPALIVE": _PROBE_S,
            "TCP_KEEPINTVL": _PROBE_S,
            "TCP_KEEPCNT": _SILENCE_S // _PROBE_S - 1,  # the first probe follows after 5 s of silence
            "TCP_USER_TIMEOUT": 1000 * _SILENCE_S,
        }
        for name, value in options.items():
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self._selector.register(connection, selectors.EVENT_READ, rank)
