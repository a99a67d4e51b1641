"""The same seed gives the same bits on one machine, whatever surrounds the computation: two runs are compared, never a run with
stored hashes, since other processors round differently."""

import json
import os
import random
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from fedrepro.checks.harness import LOCAL, flat, gap, tiny
from fedrepro.engine.method import load_methods
from fedrepro.engine.rounds import AfterRound, run
from toy import OURS

METHODS = [*OURS]

SCRIPT = """
import hashlib, json, random, sys
from contextlib import nullcontext
from dataclasses import replace
import numpy as np
import torch
from fedrepro.checks.contract import suited
from fedrepro.checks.harness import LOCAL, flat, tiny
from fedrepro.engine.evaluation import evaluate
from fedrepro.engine.method import load_methods
from fedrepro.engine.rounds import run, sequential
from fedrepro.executors.processes import Processes
from fedrepro.models import networks

def digest(message):
    "sha256 over the paths, types, shapes and bytes of everything inside nested dicts"
    bits = hashlib.sha256()
    for path, leaf in sorted(flat(message).items()):
        tensor = isinstance(leaf, torch.Tensor)
        bits.update(f"{path} {leaf.dtype if tensor else type(leaf)} {tuple(leaf.shape) if tensor else leaf!r}".encode())
        if tensor: bits.update(leaf.contiguous().numpy().tobytes())
    return bits.hexdigest()

def disturb(snapshot):
    "What a user's own code may do between two rounds"
    random.seed(snapshot.round); np.random.seed(snapshot.round); torch.manual_seed(snapshot.round)
    return random.random(), np.random.rand(3), torch.rand(3)

class Disturb:
    def after_round(self, state): disturb(state.snapshot)

def backwards(method, clients): return sequential(method, clients[::-1])[::-1]

def main(how, names):
    torch.set_num_threads(1)
    local = LOCAL | dict(batch_size=24)
    usual, out = replace(tiny(), net=networks.network("digits_cnn"), dtype=torch.float32, seed=7), {}
    with Processes(usual, 2) if how == "workers" else nullcontext({"plain": sequential, "backwards": backwards}.get(how)) as executor:
        for name in names:
            federation = suited(load_methods()[name], usual)
            method = load_methods()[name](**local | load_methods()[name].check_settings)
            done = run(method, federation, 3, evaluate, executor=executor, callbacks=[Disturb()] if how == "backwards" else [])
            s = done.snapshot
            parts = {"server": s.server, "states": dict(enumerate(s.states)), "last broadcasts": dict(enumerate(s.last_broadcasts)),
                     "rows": dict(enumerate(done.rows))}
            out[name] = {part: digest(message) for part, message in parts.items()}
    print(json.dumps(out))

if __name__ == "__main__": main(sys.argv[1], sys.argv[2:])
"""


def result(folder, how, names=METHODS, **env):
    "Digests of every method, by a fresh process that works in `folder`"
    (folder / "everything.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, folder / "everything.py", how, *names],
        capture_output=True,
        text=True,
        cwd=folder,
        env=os.environ | env,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    return result(tmp_path_factory.mktemp("first"), "plain", PYTHONHASHSEED="0")


@pytest.mark.parametrize(
    "how, env",
    [
        # two worker processes
        ("workers", dict(PYTHONHASHSEED="2", LC_ALL="C", TZ="Asia/Kathmandu")),
        # the methods in the opposite order, and global draws between rounds
        (
            "backwards",
            dict(PYTHONHASHSEED="1", LC_ALL="C.UTF-8", TZ="America/St_Johns", PYTHONUTF8="1"),
        ),
    ],
)
def test_fresh_processes_agree_for_every_method(first, tmp_path, how, env):
    "Pays for three processes that run every method, one with two workers"
    again = result(tmp_path, how, **env)
    assert set(again) == set(METHODS)
    assert not [
        f"{name}: {part}"
        for name in METHODS
        for part in first[name]
        if again[name][part] != first[name][part]
    ]


def test_the_digests_tell_methods_and_parts_apart(first):
    "All that are the same are so for a reason; an empty digest, or one of nothing but names, would be the same everywhere"
    rows = {name: first[name]["rows"] for name in METHODS}
    twins = {frozenset(n for n in METHODS if rows[n] == rows[name]) for name in METHODS}
    # on a network without blocks InCo is FedAvg
    assert {t for t in twins if len(t) > 1} == {frozenset({"FedAvg", "InCo"})}
    for name in METHODS:
        assert len(set(first[name].values())) == 4 - (name == "Union"), name


# --- what a user does meanwhile


def ends(name, callbacks=(), seed=0):
    method = load_methods()[name](**LOCAL | load_methods()[name].check_settings)
    s = run(method, replace(tiny(), seed=seed), 3, callbacks=callbacks).snapshot
    return {
        "server": s.server,
        "states": dict(enumerate(s.states)),
        "last broadcasts": dict(enumerate(s.last_broadcasts)),
    }


def state():
    return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()


@pytest.mark.parametrize("name", ["FedAvg", "FedBSS", "FedCCFA", "FedDrift"])
def test_global_generators_neither_matter_nor_move(name):
    "Reseeded and drawn from between rounds they change nothing; and a run leaves them where they were"

    def disturb(snapshot):
        random.seed(5), np.random.seed(snapshot.round), torch.manual_seed(17)
        random.random(), np.random.rand(3), torch.rand(3)

    tiny()  # imports libraries that draw a number when they are imported
    before = state()
    quiet = ends(name)
    assert state() == before
    assert gap(quiet, ends(name, [AfterRound(disturb)])) == (0.0, "")
    assert flat(quiet)


def test_other_seeds_give_other_bits():
    "The comparison sees a seed, and tensors without a name"
    assert gap(ends("FedAvg"), ends("FedAvg", seed=1))[0] > 1e-3
    assert gap(torch.zeros(2), torch.ones(2)) == (1.0, "")
