"""Work per client is work per client: the start of a run is linear in the number of clients, for every method."""

import sys
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.clients import federation
from fedrepro.checks.contract import suited
from fedrepro.engine import federation as engine
from fedrepro.engine.method import FedAvg
from fedrepro.engine.rounds import begin, next_round
from toy import OURS as METHODS


def calls(work) -> int:
    "How many functions are called, in Python and in C"
    count = 0

    def note(frame, event, argument):
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("name", [n for n in METHODS if not METHODS[n].pooled])
def test_the_start_takes_as_many_calls_for_each_client(name):
    method = METHODS[name](epochs=1, batch_size=0)

    def started(n):
        return begin(method, suited(METHODS[name], federation(n)))

    started(30)  # what is done once in a process is not counted
    few, some, many = (calls(lambda: started(n)) for n in (30, 60, 120))
    assert many - some <= 2.05 * (some - few), (few, some, many)


@pytest.mark.parametrize("name", [n for n in METHODS if not METHODS[n].pooled])
def test_label_maps_of_all_clients_are_made_once_a_round(name, monkeypatch):
    "A participant needs its own row; the maps of all clients are not made again for each"
    made = []
    place = federation(50)
    usual = type(place.drift).label_maps
    monkeypatch.setattr(
        type(place.drift), "label_maps", lambda self, t: made.append(t) or usual(self, t)
    )
    method = METHODS[name](epochs=1, batch_size=0)
    at = begin(method, place)
    started = len(made)
    next_round(method, place, at)
    assert started <= len(place.drift.change_rounds) + 1 and len(made) - started <= 1, made


@pytest.mark.parametrize("name", ["SCAFFOLD", "FedDyn", "FedDC"])
def test_clients_that_have_not_taken_part_share_their_zeros(name):
    states = begin(METHODS[name](), federation(40)).states
    assert len(
        {
            id(t)
            for s in states
            for tree in s.values()
            if isinstance(tree, dict)
            for t in tree.values()
        }
    ) == len(federation(40).initial)


def test_maps_are_those_of_the_round_however_they_are_asked_for():
    place = federation(20)
    for t in [*range(2 * engine.MAPS), 0, 3, 1]:
        assert (place.label_maps(t) == place.drift.label_maps(t)).all()
    assert len(place._maps) <= engine.MAPS
    still = replace(place, drift=None)
    assert (still.label_maps(3) == np.arange(4)).all()


def test_a_round_of_ten_takes_as_many_calls_with_many_clients():
    "But for what is copied once: the list of states, and the numbers of all clients"
    found = []
    for n in (50, 400):
        place = federation(n)
        method = FedAvg(epochs=1, batch_size=0)
        at = begin(method, place)
        next_round(method, place, at)
        found.append(calls(lambda at=at, place=place, method=method: next_round(method, place, at)))
    assert found[1] < 1.1 * found[0], found
