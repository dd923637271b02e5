"""Messages between HTTP process and model process arrive complete."""

from __future__ import annotations

import threading

import pytest

from textmill.generation.requests import MessageSocket, new_socket_pair


def test_messages_arrive_complete() -> None:
    """Also one that is larger than the socket's buffer, and numbers that JSON has no word for."""
    line, theirs = new_socket_pair()
    there = MessageSocket(theirs.detach())
    sent = [
        ["\N{GREEK SMALL LETTER MU}" * 5_000_000],
        {"at once": [0.1, 1e-7, 5e-324, 1.7976931348623157e308, float("-inf"), 2**63 - 1, None]},
    ]
    sender = threading.Thread(target=lambda: [line.send(message) for message in sent])
    sender.start()
    assert [there.receive() for _ in sent] == sent
    sender.join()


def test_reader_notices_a_closed_connection() -> None:
    line, theirs = new_socket_pair()
    theirs.close()
    with pytest.raises((EOFError, OSError)):
        line.receive()
