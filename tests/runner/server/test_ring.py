"""The sum around a ring: the same bits on every worker, as many bytes as predicted, and an error where one is down."""

import queue
import threading

import pytest
import torch

from runner.launch import network
from runner.server.links import BROKEN, accept, connect
from runner.server.ring import Ring

SECRET = b"of this test"


def ring(size):
    """The places of all workers."""
    arrived = [queue.SimpleQueue() for _ in range(size)]
    listeners = [network.listener(network.LOOPBACK) for _ in range(size)]
    for listener, place in zip(listeners, arrived, strict=True):
        accept(listener, SECRET, 20, lambda link, hello, place=place: place.put(link))
    ahead = []
    for position in range(size):
        ahead.append(connect(listeners[(position + 1) % size].getsockname()[:2], SECRET, 20))
        ahead[-1].send("ring")
    behind = [place.get() for place in arrived]
    for listener in listeners:
        listener.close()
    return [Ring(position, size, ahead[position], behind[position]) for position in range(size)]


def together(calls):
    """What all calls return or raise, each in a thread."""
    found = [None] * len(calls)

    def run(number, call):
        try:
            found[number] = call()
        except BROKEN as error:
            found[number] = error

    threads = [threading.Thread(target=run, args=pair) for pair in enumerate(calls)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not any(thread.is_alive() for thread in threads)
    return found


@pytest.mark.parametrize(("size", "elements"), [(1, 5), (2, 7), (3, 2), (4, 300_001)])
def test_every_worker_has_the_sum(size, elements):
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(elements, generator=generator) for _ in range(size)]
    want = torch.stack(values).double().sum(0)
    places = ring(size)
    for _ in range(2):
        own = [value.clone() for value in values]
        sent = together([lambda place=place, one=one: place.add(one) for place, one in zip(places, own, strict=True)])
        assert all(one.equal(own[0]) for one in own)
        assert torch.allclose(own[0].double(), want, atol=1e-5)
        assert sum(sent) == 2 * (size - 1) * elements * 4
    for place in places:
        place.close()


def test_all_hear_of_a_worker_that_is_down():
    places = ring(4)
    places[2].close()
    values = [torch.ones(1000) for _ in places]
    alive = [(place, value) for number, (place, value) in enumerate(zip(places, values, strict=True)) if number != 2]
    found = together([lambda place=place, value=value: place.add(value) for place, value in alive])
    assert all(isinstance(one, BROKEN) for one in found)
