"""Connections between hosts, here within this process."""

from __future__ import annotations

import socket
import threading

from trainwright.processes.host_links import HostLinks


def test_the_end_of_a_rank_is_noticed_and_other_programs_are_refused() -> None:
    ended, is_noticed = [], threading.Event()

    def note(rank: int, is_unreachable: bool) -> None:
        ended.append((rank, is_unreachable))
        is_noticed.set()

    main, other = HostLinks(note), HostLinks(note)
    address = main.listen()
    assert other.connect("127.0.0.1", address, 3)
    with socket.create_connection(("127.0.0.1", int(address.split()[0])), timeout=5) as stranger:
        stranger.sendall(bytes(20))
        assert stranger.recv(1) == b""
    other.close()
    assert is_noticed.wait(5)
    main.close()
    assert ended == [(3, False)]
    assert not HostLinks(note).connect("127.0.0.1", address, 3)


def test_a_connection_without_data_is_not_lost() -> None:
    ended: list[tuple[int, bool]] = []
    links = HostLinks(lambda rank, is_unreachable: ended.append((rank, is_unreachable)))
    one, other = socket.socketpair()
    with one, other:
        one.setblocking(False)
        links._check_end(one, 3)
    assert not ended
