"Every network of the zoo trains as its module does in a plain loop, or is refused in one line before the first round"

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fedrepro.core.errors import InputError
from fedrepro.core.trees import same_bits
from fedrepro.engine.declarations import Messages
from fedrepro.engine.evaluation import evaluate
from fedrepro.engine.federation import INIT, TRAIN, Federation
from fedrepro.engine.method import METHODS, FedAvg
from fedrepro.engine.rounds import begin, run
from fedrepro.models.architectures import Net
from toy import one_line
from zoo_networks import ZOO, federation

SETTINGS = dict(lr=0.05, momentum=0.9, weight_decay=1e-3, epochs=2, batch_size=4)
ACCEPTED, REFUSED = (
    [name for name, one in ZOO.items() if bool(one.refused) == no] for no in (False, True)
)


def fresh(name: str, seed: int = 0) -> torch.nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return ZOO[name].make().double()


def plain_loop(name: str, fed: Federation, rounds: int) -> dict:
    "FedAvg over copies of the module: torch.optim.SGD, and the mean of what a state_dict holds"
    start = int(np.random.default_rng([fed.seed, INIT, 0]).integers(2**62))
    server = {n: t.clone() for n, t in fresh(name, start).state_dict().items()}
    sizes = [len(rows) for rows in fed.partition.train]
    for t in range(rounds):
        models = [plain_client(fresh(name), server, fed, t, k) for k in range(fed.clients)]
        server = {n: mean_of([m[n] for m in models], sizes) for n in server}
    return server


def mean_of(tensors: list, sizes: list):
    "Floats by size; other tensors, which all clients changed alike, as they are"
    if tensors[0].is_floating_point():
        return sum(t * (n / sum(sizes)) for t, n in zip(tensors, sizes))
    assert all(torch.equal(t, tensors[0]) for t in tensors)
    return tensors[0]


def plain_client(module, server: dict, fed: Federation, t: int, k: int) -> dict:
    "One client's state_dict after training in round t"
    module.load_state_dict(server)
    rows, seeds, order = (
        fed.partition.train[k],
        fed.noise(TRAIN, t, k),
        np.random.default_rng([fed.seed, TRAIN, t, k]),
    )
    s = {n: v for n, v in SETTINGS.items() if n in ("lr", "momentum", "weight_decay")}
    optimiser = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], **s)
    seeds.integers(2**62)  # that of what comes before the training
    batches = [
        rows[some]
        for _ in range(SETTINGS["epochs"])
        for some in np.split(order.permutation(len(rows)), [4])
    ]
    with torch.random.fork_rng():
        torch.manual_seed(int(seeds.integers(2**62)))
        module.train()
        for batch in batches:
            x = fed.data.batch(fed.data.train_x[batch], None, torch.float64)
            optimiser.zero_grad()
            F.cross_entropy(module(x), fed.data.train_y[batch]).backward()
            optimiser.step()
    return {n: v.detach().clone() for n, v in module.state_dict().items()}


@pytest.mark.parametrize("name", ACCEPTED)
def test_as_in_a_plain_loop(name):
    fed = federation(name)
    torch.manual_seed(len(name))  # whatever the caller drew before
    end, right = run(FedAvg(**SETTINGS), fed, 2).snapshot.server["params"], plain_loop(name, fed, 2)
    for n, t in end.items():
        assert (
            t.dtype == torch.float64
            and float((t - right[n]).abs().max() if t.numel() else 0) < 1e-10
        ), n
    tied = {
        n
        for n, t in right.items()
        if n not in end and n not in fed.net.constants and "num_batches" not in n
    }
    assert all(any(torch.equal(right[n], right[m]) for m in end) for n in tied), tied
    for n, t in fed.net.constants.items():
        if n in right:
            assert torch.equal(t.to(right[n]), right[n])
    assert all(torch.equal(end[n], fed.initial[n]) for n in fed.net.frozen)
    assert any(not torch.equal(end[n], fed.initial[n]) for n in fed.net.trained)
    module, x = fresh(name), fed.data.batch(fed.data.test_x, None, torch.float64)
    module.load_state_dict(right)
    with torch.no_grad():
        gap = fed.net(end, x) - module.eval()(x)
    assert float(gap.abs().max()) < 1e-8


@pytest.mark.parametrize("method", ["FedProx", "SCAFFOLD", "FedCCFA"])
@pytest.mark.parametrize("name", ACCEPTED)
def test_other_methods(name, method):
    fed = federation(name, (6, 4, 8))
    history = run(
        METHODS[method](
            **SETTINGS | dict(epochs=1) | ({"momentum": 0.0} if method == "SCAFFOLD" else {})
        ),
        fed,
        1,
        evaluate,
    )
    assert history.status == "complete" and np.isfinite(history.rows[0]["train_loss"])
    end = history.snapshot.server["params"]
    assert all(t.isfinite().all() for t in end.values())
    assert all(torch.equal(end[n], fed.initial[n]) for n in fed.net.frozen if n in end)


@pytest.mark.parametrize("name", ["nothing but a head", "frozen body"])
def test_a_part_that_learns_nothing_is_not_sent_alone(name):
    "Before the first round; a method that sends the head too goes on"
    for method in ("FedBABU", "FedRep"):
        with one_line(
            f"{method}: its clients send the body alone, of which network zoo trains nothing",
            "requires_grad",
        ):
            begin(METHODS[method](**SETTINGS), federation(name, (6, 4, 8)))
    for method in ("FedAvg", "FedCCFA", "FedPAC", "Ditto"):
        begin(METHODS[method](**SETTINGS), federation(name, (6, 4, 8)))


class SendsHeads(FedAvg, listed=False):
    "Clients share their heads; bodies stay as they are"

    def client_result(self, client, params, results):
        return {"params": {n: t for n, t in params.items() if n.startswith("head.")}}, client.state

    def communication(self):
        return Messages(upload={"params": "head"})


def test_a_head_that_learns_nothing_is_not_sent_alone():
    begin(SendsHeads(**SETTINGS), federation("frozen body"))
    fed = federation("batch norm")
    head_only = replace(fed, net=network_without_head_training())
    with one_line(
        "SendsHeads: its clients send the head alone, of which network zoo trains nothing"
    ):
        begin(SendsHeads(**SETTINGS), head_only)


def network_without_head_training():
    def make():
        net = ZOO["batch norm"].make()
        net.head.requires_grad_(False)
        return net

    return Net("zoo", make)


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    with pytest.raises(InputError) as e:
        federation(name)
    assert (
        str(e.value).startswith("network zoo: ")
        and ZOO[name].refused in str(e.value)
        and "\n" not in str(e.value)
    )


def test_enough_of_them():
    assert len(ACCEPTED) >= 30 and len(REFUSED) >= 15
