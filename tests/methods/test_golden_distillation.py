"""The losses of MOON and FedNTD against FedNTD's released code (tests/golden/losses.json), and the teachers of distillation."""

import json
from pathlib import Path
from types import SimpleNamespace
import pytest
import torch
from fedrepro.core.trees import same_bits
from fedrepro.engine.client import Batch
from fedrepro.engine.rounds import run
from fedrepro.methods.distillation import MOON, FedGKD, FedNTD, contrast, distillation

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "losses.json").read_text())
TOLERANCE = 1e-12


# --- the released code's losses


class Given:
    "A network whose parameters are its outputs: logits that move (FedNTD), or features that move and logits that do not (MOON)"

    def __call__(self, params, x, train=False):
        return params["logits"] * 1  # an operation, so that gradients could flow

    def features(self, params, x, train=False):
        return params["z"] * 1

    def classify(self, params, features):
        return stored("logits")


def stored(name):
    return torch.tensor(GOLDEN[name], dtype=torch.float64)


def golden_case(want):
    "Our method with the stored settings, what moves, and a client whose teachers are the stored ones"
    settings = {name: want[name] for name in ("tau", "beta", "mu") if name in want}
    m = {"FedNTD": FedNTD, "MOON": MOON}[want["loss"]](**settings)
    received = {"logits": stored("global_logits"), "z": stored("z_global")}
    previous = {"z": stored("z_previous")}
    state = {"previous": previous, "known": torch.ones((), dtype=torch.float64)}
    return (
        m,
        want["gradient_of"],
        SimpleNamespace(net=Given(), received={"params": received}, state=state),
    )


TARGETS = torch.tensor(GOLDEN["targets"])
BATCH = Batch(torch.zeros(len(TARGETS), 1), TARGETS, torch.ones(len(TARGETS), dtype=torch.float64))


@pytest.mark.parametrize(
    "want", GOLDEN["values"], ids=lambda v: f"{v['loss']}-{v['tau']}-{v.get('beta', v.get('mu'))}"
)
def test_value_and_gradient_equal_the_released_code(want):
    m, name, client = golden_case(want)
    moving = stored(name).requires_grad_()
    loss = m.loss(client, {name: moving}, BATCH)
    (gradient,) = torch.autograd.grad(loss, moving)
    assert abs(float(loss.detach()) - want["value"]) < TOLERANCE
    assert (
        float((gradient - torch.tensor(want["gradient"], dtype=torch.float64)).abs().max())
        < TOLERANCE
    )


# --- the terms by themselves


def test_fedgkd_by_hand():
    "T = 1/2; teacher (3/4, 1/4), pupil (1/2, 1/2): T^2 KL = (3/4 ln 3 - ln 2) / 4, once each as received model and as own teacher"
    half_ln3 = torch.log(torch.tensor(3.0, dtype=torch.float64)) / 2
    teacher = torch.stack([half_ln3, half_ln3 * 0])[None]
    pupil = torch.zeros(1, 2, dtype=torch.float64)
    want = float(1.5 * half_ln3 - torch.log(torch.tensor(2.0, dtype=torch.float64))) / 4
    assert abs(float(distillation(pupil, teacher, 0.5)) - want) < TOLERANCE
    for received in (
        {"params": {"logits": teacher}},
        {"params": {"logits": pupil}, "teacher": {"logits": teacher}},
    ):
        client = SimpleNamespace(net=Given(), received=received, state={})
        one = Batch(torch.zeros(1, 1), torch.tensor([1]), torch.ones(1, dtype=torch.float64))
        loss = FedGKD(weight=2.0, tau=0.5).loss(client, {"logits": pupil}, one)
        assert (
            abs(float(loss) - float(torch.log(torch.tensor(2.0, dtype=torch.float64))) - 2 * want)
            < TOLERANCE
        )


def test_the_terms_stay_finite_at_their_edges():
    zero = torch.zeros(2, 3, requires_grad=True)
    value = contrast(zero, torch.ones(2, 3), -torch.ones(2, 3), 0.5).sum()
    assert torch.isfinite(value)
    assert torch.isfinite(torch.autograd.grad(value, zero)[0]).all()
    sure = torch.tensor([[1e4, 0.0, -1e4]], requires_grad=True)
    value = distillation(sure, -sure.detach(), 1.0).sum()
    assert torch.isfinite(value)
    assert torch.isfinite(torch.autograd.grad(value, sure)[0]).all()
    assert not distillation(sure, sure.detach(), 0.5).any()


# --- whole runs

LOCAL = dict(lr=0.05, epochs=1, batch_size=64)
ALL = [MOON(**LOCAL), FedGKD(**LOCAL), FedGKD(models=3, **LOCAL), FedNTD(**LOCAL)]


def name(m):
    return f"{type(m).__name__}{getattr(m, 'models', '')}"


@pytest.mark.parametrize("m", ALL, ids=name)
def test_teachers_are_in_eval_mode(normed, m):
    "A teacher's answer for a sample does not depend on the others in the batch, and its statistics keep every bit"
    now = run(m, normed, 3).snapshot
    k = normed.cohort(2)[0]
    client = normed.client(k, 3, m.broadcast(now.server), now.states[k])
    answers = []
    before = {n: t.clone() for n, t in client.received["params"].items()}

    class Spy:
        "The network, noting the mode in which each model is asked"

        def __init__(self, net):
            self.net = net

        def note(self, params, train):
            answers.append((params is student, train, torch.is_grad_enabled()))

        def __call__(self, params, x, train=False):
            self.note(params, train)
            return self.net(params, x, train)

        def features(self, params, x, train=False):
            self.note(params, train)
            return self.net.features(params, x, train)

        def classify(self, params, features):
            return self.net.classify(params, features)

    student = {n: t.clone() for n, t in before.items()}
    client.net = Spy(normed.net)
    m.loss(client, student, client.batch(torch.arange(8).numpy()))
    assert set(answers) == {(True, True, True), (False, False, False)}
    assert same_bits(before, client.received["params"])
