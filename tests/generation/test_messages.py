"""What travels between the front and the model: whole, in order, and without keeping anybody waiting."""

from __future__ import annotations

import pytest

from textmill.generation.messages import MessageSocket, SendQueue, new_socket_pair


def test_what_nobody_reads_yet_is_kept_in_order_and_holds_up_nobody() -> None:
    """More than a socket takes at once: a `put` that waited for a reader would wait for ever here."""
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


def test_an_end_that_is_gone_is_found_by_the_reader() -> None:
    line, theirs = new_socket_pair()
    theirs.close()
    outbox = SendQueue(line)
    outbox.put(["nobody is there"])
    with pytest.raises((EOFError, OSError)):
        line.receive()
    outbox.close()
