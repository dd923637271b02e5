"""Messages between HTTP process and model process arrive complete and in order, and never block the sender."""

from __future__ import annotations

import pytest

from textmill.generation.messages import MessageSocket, SendQueue, new_socket_pair


def test_unread_messages_are_kept_in_order_without_blocking() -> None:
    """More than a socket buffers: a `put` that waits for a reader would deadlock here."""
    line, theirs = new_socket_pair()
    outbox, there = SendQueue(line), MessageSocket(theirs.detach())
    sent = [[number, "\N{GREEK SMALL LETTER MU}" * 50_000] for number in range(40)]
    for message in sent:
        outbox.put(message)
    assert [there.receive() for _ in sent] == sent
    again = {"at once": [0.1, 1e-7, 5e-324, 1.7976931348623157e308, float("-inf"), 2**63 - 1, None]}
    outbox.put(again)
    assert there.receive() == again
    outbox.close()


def test_reader_notices_a_closed_connection() -> None:
    line, theirs = new_socket_pair()
    theirs.close()
    outbox = SendQueue(line)
    outbox.put(["nobody is there"])
    with pytest.raises((EOFError, OSError)):
        line.receive()
    outbox.close()
