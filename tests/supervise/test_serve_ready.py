"""The agent's loop calls what is ready, and nothing that an earlier call of the same turn has ended."""

import os
import selectors

from argosy.supervise.agent.agent import serve_ready


def test_a_new_client_that_gets_the_number_of_a_rank_that_ended_is_not_taken_for_it():
    """Two are ready. Whichever is called first ends the other, whose number a third one gets at once."""
    selector, called = selectors.DefaultSelector(), list[str]()
    pipes = [os.pipe(), os.pipe()]
    ends = [pipe[0] for pipe in pipes]

    def call(own: int) -> None:
        called.append("one of two")
        (other,) = {*ends} - {own}
        selector.unregister(other)
        os.close(other)
        taken = os.open(os.devnull, os.O_RDONLY)
        assert taken == other
        os.close(taken)
        os.dup2(own, other)
        selector.register(other, selectors.EVENT_READ, lambda: called.append("the third"))

    for reader, writer in pipes:
        os.write(writer, b"x")
        selector.register(reader, selectors.EVENT_READ, lambda reader=reader: call(reader))
    serve_ready(selector, 10.0)
    assert called == ["one of two"]
    assert set(ends) <= set(selector.get_map())
    selector.close()
    for fd in (*pipes[0], *pipes[1]):
        os.close(fd)
