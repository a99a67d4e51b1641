"""The losses of MOON and FedNTD against FedNTD's released code (tests/golden/losses.json), and the teachers of distillation."""
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
import pytest
import torch
from torch import nn
from fedrepro.checks.harness import padded
from fedrepro.core.errors import InputError
from fedrepro.core.trees import distance, nbytes, same_bits
from fedrepro.data import datasets, partition
from fedrepro.engine.client import Batch
from fedrepro.engine.federation import Federation
from fedrepro.engine.method import FedAvg
from fedrepro.engine.rounds import begin, next_round, run, sequential
from fedrepro.methods.distillation import MOON, FedGKD, FedNTD, contrast, distillation, not_true
from fedrepro.models import networks
from fedrepro.models.architectures import Net, Network

torch.set_num_threads(1)
GOLDEN = json.loads((Path(__file__).parent / "golden" / "losses.json").read_text())
TOLERANCE = 1e-12


# --- the released code's losses

class Given:
    "A network whose parameters are its outputs: logits that move (FedNTD), or features that move and logits that do not (MOON)"
    def __call__(self, params, x, train=False): return params["logits"] * 1  # an operation, so that gradients could flow
    def features(self, params, x, train=False): return params["z"] * 1
    def classify(self, params, features): return stored("logits")


def stored(name): return torch.tensor(GOLDEN[name], dtype=torch.float64)


def golden_case(want):
    "Our method with the stored settings, what moves, and a client whose teachers are the stored ones"
    settings = {name: want[name] for name in ("tau", "beta", "mu") if name in want}
    m = {"FedNTD": FedNTD, "MOON": MOON}[want["loss"]](**settings)
    received, previous = {"logits": stored("global_logits"), "z": stored("z_global")}, {"z": stored("z_previous")}
    state = {"previous": previous, "known": torch.ones((), dtype=torch.float64)}
    return m, want["gradient_of"], SimpleNamespace(net=Given(), received={"params": received}, state=state)


def batch(pad=0):
    y = torch.tensor(GOLDEN["targets"] + [0] * pad)
    return Batch(torch.zeros(len(y), 1), y, torch.tensor([1.] * (len(y) - pad) + [0.] * pad, dtype=torch.float64))


def test_the_file_holds_both_losses():
    assert [v["loss"] for v in GOLDEN["values"]] == ["FedNTD", "FedNTD", "MOON", "MOON"]


@pytest.mark.parametrize("want", GOLDEN["values"], ids=lambda v: f"{v['loss']}-{v['tau']}-{v.get('beta', v.get('mu'))}")
def test_value_and_gradient_equal_the_released_code(want):
    m, name, client = golden_case(want)
    moving = stored(name).requires_grad_()
    loss = m.loss(client, {name: moving}, batch())
    gradient, = torch.autograd.grad(loss, moving)
    assert abs(float(loss.detach()) - want["value"]) < TOLERANCE
    assert float((gradient - torch.tensor(want["gradient"], dtype=torch.float64)).abs().max()) < TOLERANCE


@pytest.mark.parametrize("want", GOLDEN["values"][::2], ids=lambda v: v["loss"])
def test_teachers_get_no_gradient(want):
    m, name, client = golden_case(want)
    for tree in (client.received["params"], client.state["previous"]):
        for t in tree.values(): t.requires_grad_()
    m.loss(client, {name: stored(name).requires_grad_()}, batch()).backward()
    assert all(t.grad is None for t in (*client.received["params"].values(), *client.state["previous"].values()))


def test_without_a_last_model_moon_is_cross_entropy():
    m, name, client = golden_case(GOLDEN["values"][-1])
    client.state["known"] = torch.zeros_like(client.state["known"])
    z = stored(name).requires_grad_()
    loss = m.loss(client, {name: z}, batch())
    plain = nn.functional.cross_entropy(stored("logits"), torch.tensor(GOLDEN["targets"]))
    assert abs(float(loss.detach() - plain)) < TOLERANCE and not torch.autograd.grad(loss, z)[0].any()


# --- the terms by themselves

def test_fedgkd_by_hand():
    "T = 1/2; teacher (3/4, 1/4), pupil (1/2, 1/2): T^2 KL = (3/4 ln 3 - ln 2) / 4, once each as received model and as own teacher"
    half_ln3 = torch.log(torch.tensor(3., dtype=torch.float64)) / 2
    teacher, pupil = torch.stack([half_ln3, half_ln3 * 0])[None], torch.zeros(1, 2, dtype=torch.float64)
    want = float(1.5 * half_ln3 - torch.log(torch.tensor(2., dtype=torch.float64))) / 4
    assert abs(float(distillation(pupil, teacher, .5)) - want) < TOLERANCE
    for received in ({"params": {"logits": teacher}}, {"params": {"logits": pupil}, "teacher": {"logits": teacher}}):
        client = SimpleNamespace(net=Given(), received=received, state={})
        one = Batch(torch.zeros(1, 1), torch.tensor([1]), torch.ones(1, dtype=torch.float64))
        loss = FedGKD(weight=2., tau=.5).loss(client, {"logits": pupil}, one)
        assert abs(float(loss) - float(torch.log(torch.tensor(2., dtype=torch.float64))) - 2 * want) < TOLERANCE


def test_the_true_logit_does_not_matter_to_fedntd():
    y = torch.tensor(GOLDEN["targets"])
    z = stored("logits").requires_grad_()
    gradient, = torch.autograd.grad(distillation(not_true(z, y), not_true(stored("global_logits"), y), 3.).sum(), z)
    assert not gradient[torch.arange(len(y)), y].any() and gradient.abs().sum() > 0


def test_the_terms_stay_finite_at_their_edges():
    zero = torch.zeros(2, 3, requires_grad=True)
    value = contrast(zero, torch.ones(2, 3), -torch.ones(2, 3), .5).sum()
    assert torch.isfinite(value) and torch.isfinite(torch.autograd.grad(value, zero)[0]).all()
    sure = torch.tensor([[1e4, 0., -1e4]], requires_grad=True)
    value = distillation(sure, -sure.detach(), 1.).sum()
    assert torch.isfinite(value) and torch.isfinite(torch.autograd.grad(value, sure)[0]).all()
    assert not distillation(sure, sure.detach(), .5).any()


# --- whole runs, three of seven clients a round

@pytest.fixture(scope="module")
def part():
    digits = datasets.load("digits")
    cut = partition.partition("dirichlet-class", digits.train_y.numpy(), clients=7, seed=1, alpha=.3)
    return Federation(digits, networks.network("digits_cnn"), cut, participation=.4, dtype=torch.float64)


@pytest.fixture(scope="module")
def normed(part):
    make = lambda: Network(nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8)), nn.Linear(8, 10))
    return replace(part, net=Net("norm", make))


LOCAL = dict(lr=.05, epochs=1, batch_size=64)
ALL = [MOON(**LOCAL), FedGKD(**LOCAL), FedGKD(models=3, **LOCAL), FedNTD(**LOCAL)]
NOTHING = [MOON(mu=0., **LOCAL), FedGKD(weight=0., **LOCAL), FedGKD(weight=0., models=3, **LOCAL), FedNTD(beta=0., **LOCAL)]


def name(m): return f"{type(m).__name__}{getattr(m, 'models', '')}"


@pytest.mark.parametrize("m", NOTHING, ids=name)
@pytest.mark.parametrize("network", ["part", "normed"])
def test_without_its_term_it_is_fedavg(request, network, m):
    "With batch norm too: the teachers leave every statistic alone"
    fed = request.getfixturevalue(network)
    assert distance(run(m, fed, 3).snapshot.server["params"], run(FedAvg(**LOCAL), fed, 3).snapshot.server["params"]) == 0


@pytest.mark.parametrize("m", ALL, ids=name)
def test_teachers_are_in_eval_mode(normed, m):
    "A teacher's answer for a sample does not depend on the others in the batch, and its statistics keep every bit"
    now = run(m, normed, 3).snapshot
    k = normed.cohort(2)[0]
    client, answers = normed.client(k, 3, m.broadcast(now.server), now.states[k]), []
    before = {n: t.clone() for n, t in client.received["params"].items()}

    class Spy:
        "The network, noting the mode in which each model is asked"
        def __init__(self, net): self.net = net
        def note(self, params, train): answers.append((params is student, train, torch.is_grad_enabled()))
        def __call__(self, params, x, train=False):
            self.note(params, train)
            return self.net(params, x, train)
        def features(self, params, x, train=False):
            self.note(params, train)
            return self.net.features(params, x, train)
        def classify(self, params, features): return self.net.classify(params, features)

    student = {n: t.clone() for n, t in before.items()}
    client.net = Spy(normed.net)
    m.loss(client, student, client.batch(torch.arange(8).numpy()))
    assert set(answers) == {(True, True, True), (False, False, False)}
    assert same_bits(before, client.received["params"])


def test_moon_remembers_the_last_participation_however_old(part):
    m, seen, now = MOON(**LOCAL), {}, begin(MOON(**LOCAL), part)

    def watched(m, clients):
        for c in clients:  # what each is given: its own last upload, or none
            assert bool(c.state["known"]) == (c.id in seen)
            if c.id in seen: assert same_bits(c.state["previous"], seen[c.id])
        out = sequential(m, clients)
        seen.update({c.id: o[0]["params"] for c, o in zip(clients, out)})
        return out
    absences = 0
    for t in range(8):
        absences += sum(k in seen and k not in part.cohort(t) for k in range(7))
        now = next_round(m, part, now, watched)
    assert absences and sum(float(s["known"]) for s in now.states) == len(seen)


def test_moon_differs_from_fedavg_by_who_comes_back(part):
    "A cohort of newcomers works as FedAvg's; a returning client does not"
    m, plain = MOON(**LOCAL), FedAvg(**LOCAL)
    now = run(m, part, 1).snapshot
    message = m.broadcast(now.server)
    back, new = part.cohort(0)[0], next(k for k in range(7) if k not in part.cohort(0))
    def ends(m, k): return sequential(m, [part.client(k, 1, message, now.states[k])])[0][0]["params"]
    assert distance(ends(m, new), ends(plain, new)) == 0 and distance(ends(m, back), ends(plain, back)) > 1e-3


def test_fedgkd_teachers_of_one_model_are_the_received_one(part):
    "M = 1 and M > 1 agree in the first round, when there is one global model only, and not afterwards"
    one, more = FedGKD(weight=5., **LOCAL), FedGKD(weight=5., models=4, **LOCAL)
    first = [run(m, part, 1).snapshot.server["params"] for m in (one, more)]
    third = [run(m, part, 3).snapshot.server["params"] for m in (one, more)]
    assert distance(*first) < 1e-12 and distance(*third) > 1e-6
    assert "past" not in run(one, part, 1).snapshot.server and len(run(more, part, 3).snapshot.server["past"]) == 4


@pytest.mark.parametrize("m, down", list(zip(ALL, (1, 1, 2, 1))), ids=lambda v: name(v) if not isinstance(v, int) else "")
def test_traffic_resume_order_and_padding(part, m, down):
    straight, model = run(m, part, 4).snapshot, nbytes(part.initial)
    assert (straight.bytes_up, straight.bytes_down) == (4 * 3 * model, 4 * 3 * down * model)
    paused = run(m, part, 4, start=run(m, part, 2).snapshot).snapshot
    backwards = run(m, part, 4, executor=lambda m, clients: sequential(m, clients[::-1])[::-1]).snapshot
    for other in (paused, backwards): assert same_bits([straight.server, straight.states], [other.server, other.states])
    wider = run(m, part, 4, executor=padded(5)).snapshot.server["params"]
    assert distance(wider, straight.server["params"]) < 1e-10


@pytest.mark.parametrize("make", [lambda: MOON(tau=0.), lambda: FedGKD(tau=0.), lambda: FedGKD(models=0), lambda: FedNTD(tau=0.),
                                  lambda: FedNTD(beta=-1.), lambda: MOON(mu=float("inf"))])
def test_impossible_settings_are_refused(make):
    with pytest.raises(InputError, match=r"\w+\(\w+=.*\): expected"): make()
