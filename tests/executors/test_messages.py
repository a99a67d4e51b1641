"What travels between processes arrives as it was, through a pipe or through memory that both sides see"

import os
import pickle
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch

from fedrepro.core.trees import same_bits
from fedrepro.engine import rounds
from fedrepro.engine.divergence import Diverged
from fedrepro.engine.method import FedAvg, load_methods
from fedrepro.engine.rounds import AfterRound, run
from fedrepro.executors import messages, processes
from fedrepro.executors.processes import NoWorker, Processes, Workers, report
from fedrepro.executors.messages import LARGE, SharedBuffer, dumps, loads
from fedrepro.models.net import Net
from toy import few

LINUX = pytest.mark.skipif(
    sys.platform != "linux",
    reason="memory by file is Linux's; elsewhere all travels in the message",
)
TOY = few((9, 12, 1, 16, 5), "feddc_mlp")
LOCAL = dict(lr=0.05, epochs=1, batch_size=8)


def opened() -> list[str]:
    "The shared memory that this process holds"

    def target(file):
        try:
            return os.readlink(f"/proc/self/fd/{file}")
        except FileNotFoundError:
            return ""  # the folder's own

    return [t for t in map(target, os.listdir("/proc/self/fd")) if "memfd:fedrepro" in t]


@pytest.mark.parametrize("in_memory", [False, pytest.param(True, marks=LINUX)])
def test_what_travels_arrives_as_it_was(in_memory, monkeypatch):
    "Tensors of every kind: values, type, strides (which choose the kernel), alignment; one object sent twice is one there too"
    monkeypatch.setattr(messages, "LARGE", 0)
    one = torch.randn(3)
    picture = torch.randn(16, 5, 5, 1)
    sent = {
        "twice": [one, one],
        "scalar": torch.tensor(2.0),
        "empty": torch.zeros(0, 4),
        "flags": one > 0,
        "counts": torch.arange(5),
        "half": one.bfloat16(),
        "float16": one.half(),
        "complex": torch.complex(one, one),
        "double": one.double(),
        "wide": one.expand(4, 3),
        "turned": torch.randn(3, 4).T,
        "part": torch.randn(9)[2:5],
        "shared": torch.nn.Parameter(torch.randn(2)),
        "last": torch.randn(2, 3, 4, 4).contiguous(memory_format=torch.channels_last),
        "one channel": picture.permute(0, 3, 1, 2),
        "leaf": one.clone().requires_grad_(),
        "array": np.arange(3),
        "text": "x",
        "none": None,
    }
    before = len(opened())
    shared = SharedBuffer() if in_memory else None
    message = dumps(sent, shared)
    there = SharedBuffer(shared.place) if shared else None
    if shared:
        shared.close()  # who has opened it keeps it
    found = loads(message, there)
    assert found.keys() == sent.keys()
    assert found["twice"][0] is found["twice"][1]
    for name in ("array", "text", "none"):
        assert np.array_equal(found[name], sent[name])
    for a, b in [(sent[n], found[n]) for n in sent if isinstance(sent[n], torch.Tensor)] + [
        (one, found["twice"][0])
    ]:
        assert torch.equal(a, b)
        assert (a.dtype, a.stride(), a.requires_grad) == (
            b.dtype,
            b.stride(),
            b.requires_grad,
        )
        assert b.untyped_storage().data_ptr() % 64 == 0
    found["twice"][0].add_(1)  # it may be written to, and nobody else sees it
    assert torch.equal(sent["twice"][0], one)
    assert torch.equal(loads(message, there)["twice"][1], one)
    if there:
        there.close()
    assert len(opened()) == before
    assert len(dumps(torch.zeros(100_000)[:3])) < 1000  # not all that lies behind it


@LINUX
def test_a_large_tensor_lies_there_once_for_every_message():
    large = torch.randn(LARGE // 4)
    small = torch.randn(LARGE // 4 - 1)
    with SharedBuffer() as shared:
        first = dumps([large, small], shared)
        second = dumps({"again": large}, shared)
        assert shared.end == large.nbytes
        assert len(second) < 500 < small.nbytes < len(first)
        with pytest.raises(pickle.UnpicklingError, match="read without it"):
            loads(second)
        with SharedBuffer(shared.place) as there:
            assert torch.equal(loads(second, there)["again"], large)
            os.truncate(shared.place[0], LARGE // 2)
            with pytest.raises(EOFError, match="bytes of a tensor are missing"):
                loads(first, there)


def ends(method, executor):
    return [
        getattr(run(method, TOY, 2, executor=executor).snapshot, name)
        for name in ("server", "states")
    ]


@pytest.mark.parametrize("name", ["FedAvg", "SCAFFOLD", "FedCDA"])
def test_workers_get_and_give_large_tensors(name, monkeypatch):
    "The bits of the loop: with shared memory, where workers cannot open them, and where there are none"
    method = load_methods()[name](**LOCAL)
    alone = ends(method, rounds.sequential)
    assert max(t.nbytes for t in alone[0]["params"].values()) >= LARGE
    with Processes(TOY, 2) as pool:
        assert same_bits(ends(method, pool), alone)
        assert pool.shares_memory == (sys.platform == "linux")
        if sys.platform == "linux":
            assert opened() == []
        with monkeypatch.context() as patch:
            make = SharedBuffer.__init__

            def astray(self, place=None):
                make(self, place)
                self.place = "/proc/self/fd/100000", 0, 1

            patch.setattr(SharedBuffer, "__init__", astray)
            assert same_bits(ends(method, pool), alone)
            assert not pool.shares_memory
        pool.shares_memory = True
        with monkeypatch.context() as patch:

            def full(self, t):
                raise OSError(28, "No space left on device")

            patch.setattr(SharedBuffer, "put", full)
            assert same_bits(ends(method, pool), alone)
            assert not pool.shares_memory
        pool.shares_memory = True
        monkeypatch.delattr(os, "memfd_create", raising=False)
        assert same_bits(ends(method, pool), alone)
        assert not pool.shares_memory


@LINUX
class BreaksInTraining(FedAvg, listed=False):
    "At module level, because workers import what they compute"

    def loss(self, client, params, batch):
        raise TypeError("in a worker")


def test_nothing_stays_open_after_an_error():
    broken = BreaksInTraining(**LOCAL)
    with Processes(TOY, 2) as pool:
        with pytest.raises(TypeError):
            run(broken, TOY, 1, executor=pool)
        assert opened() == []
        assert pool.shares_memory
        assert same_bits(ends(FedAvg(**LOCAL), pool), ends(FedAvg(**LOCAL), rounds.sequential))
        victims = []

        def kill(_):
            victim = next(worker.process for worker in pool.pool.workers.values() if worker.ready)
            victims.append(victim.pid)
            os.kill(victim.pid, signal.SIGKILL)
            victim.join()  # or the others could finish the next round before this one has ended

        late = run(FedAvg(**LOCAL), TOY, 2, executor=pool, callbacks=[AfterRound(kill)]).snapshot
        assert same_bits(late.server, run(FedAvg(**LOCAL), TOY, 2).snapshot.server)
        assert len(set(victims)) == 2
        assert opened() == []


# --- workers that die: module level, because workers import what they compute


def slowly_big():
    "Its answer fills the pipe, so that it can be killed while it writes"
    report(os.getpid())
    return bytes(10_000_000)


def half_an_answer(folder, times):
    "Dies `times` times after the first bytes of an answer"
    seen = len(list(folder.glob("half*")))
    if seen < times:
        (folder / f"half{seen}").touch()
        os.write(processes._parent.fileno(), b"\0\0\1\0half")
        os.kill(os.getpid(), signal.SIGKILL)
    return seen


def ends_the_program(code):
    sys.exit(code)


@LINUX
def test_a_worker_that_dies_while_it_writes_holds_up_nobody(tmp_path, monkeypatch):
    "Its task is tried again, here twice at most, and no other task knows of it; pays for a worker after each death"
    monkeypatch.setattr(processes, "TRIES", 2)
    tasks = [
        (slowly_big, ()),
        (half_an_answer, (tmp_path / "a", 1)),
        (half_an_answer, (tmp_path / "b", 9)),
        (ends_the_program, (0,)),
        (pow, (2, 3)),
    ]
    for name in "ab":
        (tmp_path / name).mkdir()
    heard = {i: [] for i in range(len(tasks))}
    with Workers(2, lambda number: dumps((pow, (number, 2)))) as workers:
        for i, kind, content in workers.work([dumps(task) for task in tasks]):
            if kind == "report" and not heard[0]:
                time.sleep(0.3)  # nobody reads: it stands in the middle of its answer
                os.kill(content[0], signal.SIGKILL)
            heard[i].append((kind, content if kind == "done" and i != 0 else None))
    assert [k for k, _ in heard[0]] == ["report", "died", "report", "done"]
    assert heard[1] == [("died", None), ("done", 1)]
    assert [k for k, _ in heard[2]] == [
        "died",
        "lost",
    ]
    assert heard[3] == [("failed", None)]
    assert heard[4] == [("done", 8)]
    with (
        Workers(1, lambda number: dumps((os._exit, (1,)))) as workers,
        pytest.raises(RuntimeError, match="no worker process could be started"),
    ):
        list(workers.work([dumps((pow, (2, 3)))]))


@LINUX
def test_a_worker_that_does_not_start_holds_up_nobody():
    "Stopped before it reads, and sent more than a pipe holds; the other one computes all tasks"
    with Workers(2, lambda number: dumps((len, (bytes(1_000_000),)))) as workers:
        workers.start_for(2)
        os.kill(workers.workers[0].process.pid, signal.SIGSTOP)
        heard = sorted(
            (i, kind, content)
            for i, kind, content in workers.work([dumps((pow, (2, n))) for n in range(4)])
        )
    assert heard == [(n, "done", 2**n) for n in range(4)]


SCRIPT = """
from fedrepro.executors.processes import Workers, dumps
print("once more", flush=True)
{guard}:
    with Workers(2, lambda number: dumps((int, ()))) as workers:
        print(*workers.work([dumps((pow, (2, 3)))]))
"""


@pytest.mark.parametrize("guarded", [True, False])
def test_a_script_may_start_workers_where_they_do_not_import_it(tmp_path, guarded):
    "Else it is refused in a line, by the first worker, and not started again and again"
    script = tmp_path / "mine.py"
    guard = 'if __name__ == "__main__"' if guarded else "if True"
    script.write_text(SCRIPT.format(guard=guard))
    ended = subprocess.run([sys.executable, script], capture_output=True, text=True)
    assert ended.stdout.count("once more") == 2
    if guarded:
        assert ended.returncode == 0
        assert "(0, 'done', 8)" in ended.stdout
        return
    assert ended.returncode == 1
    assert "bootstrapping" not in ended.stderr
    assert ended.stderr.splitlines()[-1].endswith(
        f"InputError: {script}: it starts worker processes, which import it and would start more; "
        'put what it runs under if __name__ == "__main__":'
    )


def test_no_more_processes_can_be_started(monkeypatch):
    def start(self):
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr("multiprocessing.context.SpawnProcess.start", start)
    with (
        Workers(2, lambda number: b"") as workers,
        pytest.raises(NoWorker, match="Resource temporarily unavailable"),
    ):
        list(workers.work([b""]))


class Kept(Net):
    "A network of one's own"


# the second cannot be unpickled
@pytest.mark.parametrize("error", [ValueError("small"), Diverged(3, 1.0)])
def test_an_error_travels_with_its_traceback(error):
    try:
        raise error
    except Exception as caught:
        assert "test_messages.py" in loads(dumps(processes.portable(caught))).__notes__[0]


def test_a_network_of_ones_own_travels_as_it_is():
    assert type(loads(dumps(Kept("own", TOY.net.make)))) is Kept


@LINUX
def test_no_other_file_is_taken_for_shared_memory(tmp_path):
    "Its number may belong to something else by the time a message is read"
    with SharedBuffer() as shared:
        place = shared.place
    with pytest.raises(OSError):
        SharedBuffer(place)
    (tmp_path / "precious").write_bytes(b"as it was")
    file = int(place[0].rsplit("/", 1)[1])
    other = os.open(tmp_path / "precious", os.O_RDWR)
    try:
        os.dup2(other, file)
        before = len(os.listdir("/proc/self/fd"))
        with pytest.raises(OSError, match="is something else now"):
            SharedBuffer(place)
        assert len(os.listdir("/proc/self/fd")) == before
        assert (tmp_path / "precious").read_bytes() == b"as it was"
    finally:
        for each in {other, file}:
            os.close(each)
