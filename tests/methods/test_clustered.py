"""IFCA and FedDrift: against a plain loop in the order of FedCCFA's code, at partial participation, and stacked."""

from dataclasses import dataclass, replace
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.cluster.hierarchy import fcluster, linkage
from scipy.spatial.distance import squareform
from fedrepro.core.errors import InputError
from fedrepro.core.trees import distance, same_bits, weighted_mean
from fedrepro.data import concept_drift, datasets, partition
from fedrepro.engine.client import client_round, start_phase
from fedrepro.engine.evaluation import eval_models
from fedrepro.engine.federation import Federation
from fedrepro.engine.method import Exchange, FedAvg
from fedrepro.engine.rounds import begin, next_round, run
from fedrepro.methods.clustered import IFCA, FedDrift, merged, new_model
from fedrepro.models import networks

K = 8
LOCAL = dict(lr=0.05, epochs=2, batch_size=16)
LONGER = dict(lr=0.05, epochs=5, batch_size=12)


def federation(drift="sudden", participation=0.5, recipe="iid-class"):
    digits = datasets.load("digits").first(640, 120)
    cut = partition.partition(
        recipe, digits.train_y.numpy(), digits.test_y.numpy(), clients=K, seed=0
    )
    schedule = concept_drift.drift(drift, clients=K, classes=10, at=2, back=2, step=1)
    net = networks.network("digits_cnn")
    return Federation(digits, net, cut, schedule, participation=participation, dtype=torch.float64)


# --- a plain loop in the order of the released code


def mean_loss(fed, params, k, labels):
    x = fed.data.batch(fed.data.train_x[fed.indices[k]], None, fed.dtype)
    with torch.no_grad():
        return float(F.cross_entropy(fed.net(params, x), torch.as_tensor(labels)))


def merge(trees, identity, cohort, losses, sizes, delta):
    "Merge the closest clusters of the cohort's clients, drop models, and move the numbers of the cohort alone"
    M = len(trees)
    d = {}

    def members(j):
        return [k for k in cohort if identity[k] == j]

    def L(i, j):
        return sum(sizes[k] * losses[k][i] for k in members(j)) / sum(sizes[k] for k in members(j))

    for i in range(M):
        for j in range(i + 1, M):
            if members(i) and members(j):
                d[i, j] = max(L(i, j) - L(i, i), L(j, i) - L(j, j), 0)
    gone = []
    while d and min(d.values()) < delta:
        i, j = min(d, key=d.get)
        trees[i] = weighted_mean(
            [trees[i], trees[j]], [sum(sizes[k] for k in members(m)) for m in (i, j)]
        )
        for k in members(j):
            identity[k] = i
        for other in range(M):
            a = tuple(sorted((i, other)))
            b = tuple(sorted((j, other)))
            if a in d and b in d:
                d[a] = max(d[a], d[b])
        d = {pair: v for pair, v in d.items() if j not in pair}
        gone = gone + [j]
    for j in sorted(gone, reverse=True):
        for k in cohort:
            identity[k] = None if identity[k] is None else identity[k] - (identity[k] > j)
        del trees[j]


def released(fed, rounds, delta, keep_previous):
    "Yields (models, positions of all clients) after each round; `keep_previous`: absent clients keep previous labels"
    trees = [fed.initial]
    identity = [0] * K
    sizes = [len(rows) for rows in fed.indices]
    labels = lambda t: [fed.client(k, t, {}, {}).labels for k in range(K)]
    previous = labels(0)
    for t in range(rounds):
        present = labels(t)
        cohort = fed.cohort(t)
        losses = {}
        for k in cohort:
            losses[k] = [mean_loss(fed, w, k, present[k]) for w in trees]
            jump = min(losses[k]) > min(mean_loss(fed, w, k, previous[k]) for w in trees) + delta
            identity[k] = None if jump else int(np.argmin(losses[k]))
        merge(trees, identity, cohort, losses, sizes, delta)
        for k in [k for k in cohort if identity[k] is None]:
            identity[k] = len(trees)
            trees.append(new_model(fed.client(k, t, {}, {})))
        heard = {k: {"params": trees[identity[k]]} for k in cohort}
        local = {
            k: client_round(FedAvg(**LONGER), fed.client(k, t, heard[k], {}))[0]["params"]
            for k in cohort
        }
        for m in range(len(trees)):
            on = [k for k in cohort if identity[k] == m]
            if on:
                trees[m] = weighted_mean([local[k] for k in on], [sizes[k] for k in on])
        previous = [
            present[k] if k in cohort or not keep_previous else previous[k] for k in range(K)
        ]
        yield list(trees), list(identity)


@pytest.mark.parametrize(
    "drift, participation, previous",
    [
        ("sudden", 1.0, "as_published"),
        ("reoccurring", 0.5, "as_published"),
        ("reoccurring", 0.5, "participation"),
        ("incremental", 0.4, "participation"),
    ],
)
def test_every_round_equals_a_plain_loop(drift, participation, previous):
    fed = federation(drift, participation)
    fixed, published = (
        FedDrift(previous=previous, variant=v, **LONGER) for v in ("corrected", "as_published")
    )
    now = begin(published, fed)
    same = begin(fixed, fed)
    for trees, positions in released(fed, 5, 0.5, previous == "participation"):
        now = next_round(published, fed, now)
        same = next_round(fixed, fed, same)
        assert list(now.server["models"]) == [str(m) for m in range(len(trees))]
        assert (
            max(distance(a, b) for a, b in zip(now.server["models"].values(), trees, strict=True))
            < 1e-10
        )
        assert [int(s["cluster"]) for s in now.states] == positions
        for params, m in zip(eval_models(published, fed, now), positions):
            assert distance(params, trees[min(m, len(trees) - 1)]) < 1e-10
        assert same_bits(list(now.server["models"].values()), list(same.server["models"].values()))
    given = same.server["now"].tolist()
    # models came, and some merged
    assert len(given) > 3
    assert drift == "incremental" or len(set(given)) < len(given)


# --- merging


def test_merging_is_scipys_complete_linkage():
    rng = np.random.default_rng(0)
    for n in (2, 5, 9):
        points = rng.random((n, 2))
        d = np.linalg.norm(points[:, None] - points[None], axis=-1)
        for delta in (0.1, 0.3, 0.6, 2.0):
            theirs = fcluster(linkage(squareform(d), "complete"), delta, "distance")
            ours = merged(torch.tensor(d + np.diag(np.full(n, np.inf))), delta)
            assert all(
                (ours[i] == ours[j]) == (theirs[i] == theirs[j]) for i in range(n) for j in range(n)
            )
            assert all(ours[i] <= i and ours[ours[i]] == ours[i] for i in range(n))


def test_merged_clients_start_from_the_mean_of_their_models():
    "Two models that fit alike merge: by the samples of those who chose them, at the server and at every client"
    fed = federation("none", 1.0)
    method = FedDrift(models=2, delta=0.5, **LOCAL)
    start = begin(method, fed)
    clients = [fed.client(k, 0, method.broadcast(start.server), start.states[k]) for k in range(K)]
    losses = [torch.tensor([0.1, 0.2] if k < 3 else [0.3, 0.2]).double() for k in range(K)]
    answers = [{"losses": l, "cluster": l.argmin()} for l in losses]
    sizes = [c.n for c in clients]
    server, replies = method.survey().assign(
        start.server, Exchange(0, list(range(K)), answers, sizes, None, None)
    )
    mean = weighted_mean(list(start.server["models"].values()), [sum(sizes[:3]), sum(sizes[3:])])
    assert list(server["models"]) == ["0"]
    assert server["now"].tolist() == [0, 0]
    assert distance(server["models"]["0"], mean) < 1e-10
    for client, reply in zip(clients, replies):
        client.received = client.received | reply
        (phase,) = method.local_phases(client)
        assert distance(start_phase(client, phase, {}), mean) < 1e-10
        assert int(client.constants["cluster"]) == 0


# --- what each client knows


@pytest.mark.parametrize("variant", ["corrected", "as_published"])
def test_numbers_stay_meaningful(variant):
    fed = federation("reoccurring", 0.4)
    method = FedDrift(previous="participation", variant=variant, **LONGER)
    now = begin(method, fed)
    for t in range(5):
        before = now
        now = next_round(method, fed, now)
        assert now.server["identity"].tolist() == [int(s["cluster"]) for s in now.states]
        assert all(str(int(n)) in now.server["models"] for n in now.server["now"])
        assert all(now.states[k] is before.states[k] for k in range(K) if k not in fed.cohort(t))
        assert all(int(now.states[k]["last"]) == t for k in fed.cohort(t))
        measures = method.extra_metrics(now.server)
        assert 1 <= measures["used_models"] <= measures["models"] == len(now.server["models"])
    assert measures["used_models"] > 1


def test_nobody_drifts_where_nothing_changes():
    "Also with delta 0: both losses are measured on the same views"
    for m in (FedDrift(delta=0.0, **LOCAL), FedDrift(delta=0.0, previous="participation", **LOCAL)):
        assert list(run(m, federation("none"), 3).snapshot.server["models"]) == ["0"]


# --- augmentation


class Dimmed:
    "Digits whose samples are dimmed at random in training"

    def __init__(self):
        self.digits = datasets.load("digits")

    def __getattr__(self, name):
        return getattr(self.digits, name)

    def draw(self, n, rng):
        return rng.integers(0, 4, (n, 4))

    def batch(self, x, draws=None, dtype=torch.float32):
        x = self.digits.batch(x, None, dtype)
        return x if draws is None else x / (1 + draws[:, 0].to(dtype))[:, None, None, None]


def test_one_view_serves_models_and_names():
    fed = replace(federation("none"), data=Dimmed())
    drift, ifca = (
        run(m, fed, 2).snapshot
        for m in (FedDrift(models=3, delta=0.0, **LOCAL), IFCA(models=3, **LOCAL))
    )
    assert max(distance(drift.server["models"][m], ifca.server["models"][m]) for m in "012") < 1e-10
    stored, avg = (
        run(m, fed, 2).snapshot
        for m in (FedDrift(delta=1e9, augmented=False, **LOCAL), FedAvg(**LOCAL))
    )
    # the stream of batches did not move
    assert distance(stored.server["models"]["0"], avg.server["params"]) < 1e-10
    drawn = run(FedDrift(delta=1e9, **LOCAL), fed, 2).snapshot
    assert distance(drawn.server["models"]["0"], avg.server["params"]) > 1e-3  # it did


# --- executors, resume, input


@dataclass(frozen=True)
class Merged(concept_drift.DriftSchedule):
    "Classes 0 and 1 are called the same"

    def label_maps(self, t):
        return np.maximum(super().label_maps(t), 1)


class NoChanges(concept_drift.DriftSchedule):
    "Its labels change in round 2, of which `change_rounds` knows nothing"

    def label_maps(self, t):
        return np.roll(super().label_maps(t), int(t >= 1), axis=1)


@pytest.mark.parametrize("drift", [Merged("merged", K, 10), NoChanges("rolls", K, 10)])
def test_a_drift_that_cannot_be_undone_is_refused(drift):
    with pytest.raises(InputError, match="change_rounds"):
        begin(FedDrift(), replace(federation(), drift=drift))
