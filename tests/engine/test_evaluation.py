"""Every metric against another implementation: scikit-learn, scipy, numpy, the standard library, torch.optim."""

import math
import statistics
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings, strategies as st
from scipy import stats
from sklearn.metrics import accuracy_score, adjusted_rand_score
from torch import nn

from fedrepro.checks.harness import tiny
from fedrepro.core.errors import InputError
from fedrepro.engine.evaluation import (
    Predictor,
    Evaluator,
    evaluate,
    finetuned,
    generalised_accuracy,
    eval_models,
    own_value,
    personalised_accuracy,
)
from fedrepro.engine.client import train
from fedrepro.engine.declarations import with_hooks
from fedrepro.engine.federation import TUNE
from fedrepro.engine.method import FedAvg
from fedrepro.engine.rounds import begin, next_round, run
from fedrepro.engine.rows import (
    METRICS,
    PACKAGE_METRICS,
    RESERVED,
    Metric,
    add_metric,
    metric_named,
    summarise,
)
from fedrepro.methods.fedccfa import cluster_scores, label_entropy, madd
from fedrepro.reporting.compare import compare
from fedrepro.verdicts.summaries import std_of_last_rounds, to_target
from fedrepro.verdicts.tables import half_width, mean_std
from toy import OURS as METHODS, one_line

SEEDS = st.integers(0, 2**32 - 1)
SOME = settings(max_examples=60, deadline=None)
points = st.floats(0, 100, width=32)


# --- accuracy, from predictions


@SOME
@given(SEEDS, st.integers(1, 6), st.integers(1, 50), st.integers(1, 7), st.booleans())
def test_accuracies_are_means_of_scikit_learns(seed, clients, samples, classes, one_model):
    rng = np.random.default_rng(seed)
    y = rng.integers(0, classes, samples)
    predicted = [torch.as_tensor(rng.integers(0, classes, samples)) for _ in range(clients)]
    if one_model:
        predicted = predicted[:1] * clients
    maps = np.stack([rng.permutation(classes) for _ in range(clients)])
    # some of them empty
    shares = np.split(rng.permutation(samples), np.sort(rng.integers(0, samples + 1, clients - 1)))
    whole = [accuracy_score(concept[y], p) for concept, p in zip(maps, predicted)]
    assert generalised_accuracy(predicted, torch.as_tensor(y), maps) == pytest.approx(
        100 * np.mean(whole), abs=1e-9
    )
    own = [
        accuracy_score(concept[y[rows]], p[rows])
        for concept, p, rows in zip(maps, predicted, shares)
        if len(rows)
    ]
    assert personalised_accuracy(predicted, torch.as_tensor(y), maps, shares) == pytest.approx(
        100 * np.mean(own), abs=1e-9
    )


@pytest.mark.parametrize(
    "metric, more", [(generalised_accuracy, ()), (personalised_accuracy, ([[0], [1]],))]
)
def test_every_client_needs_a_prediction_and_a_concept(metric, more):
    y = torch.tensor([0, 1])
    with pytest.raises(ValueError):
        metric([y], y, np.tile([0, 1], (2, 1)), *more)


# --- predictions, from models


def by_numpy(federation, params):
    "(N, C) logits of the tiny network on the whole test set"
    w = {n: t.numpy() for n, t in params.items()}
    x = federation.data.batch(federation.data.test_x, None, federation.dtype).flatten(1).numpy()
    x = x @ w["body.fc1.weight"].T + w["body.fc1.bias"]
    x = np.where(x > 0, x, 0.01 * x) @ w["body.header1.weight"].T + w["body.header1.bias"]
    return x @ w["head.weight"].T + w["head.bias"]


@settings(max_examples=20, deadline=None)
@given(SEEDS, st.integers(1, 6), st.integers(1, 400))
def test_predictions_are_numpys_however_models_share_parts(seed, count, chunk):
    federation = tiny()
    rng = np.random.default_rng(seed)
    drawn = [federation.own_init(k) for k in range(3)]
    bodies, heads = (
        [{n: t for n, t in w.items() if n.startswith(part)} for w in drawn]
        for part in ("body.", "head.")
    )
    models = [bodies[i] | heads[j] for i, j in rng.integers(0, 3, (count, 2))]
    for p, params in zip(Predictor()(federation, models, chunk), models, strict=True):
        assert np.array_equal(p.numpy(), by_numpy(federation, params).argmax(1))


# --- which model is judged


def played(name, rounds=4):
    "(method, its federation, the snapshots, cohorts) of a run in which two of five clients miss each round"
    method = METHODS[name](lr=0.05, epochs=1, batch_size=8)
    # it refuses clients that disagree on labels
    given = replace(tiny(), drift=None) if name == "Union" else tiny()
    federation = given.pooled() if method.pooled else given
    snapshots = []
    cohorts = []
    snapshots.append(begin(method, federation))
    for t in range(rounds):
        cohorts.append(federation.cohort(t))
        snapshots.append(next_round(method, federation, snapshots[-1]))
    return method, federation, snapshots, cohorts


def last_heard(k, cohorts, rounds):
    "After how many rounds client k last heard from the server"
    return max([t + 1 for t, cohort in enumerate(cohorts[:rounds]) if k in cohort], default=0)


@pytest.mark.parametrize("rounds", range(5))
def test_a_personal_model_is_as_old_as_its_client(rounds):
    method, federation, snapshots, cohorts = played("FedRep")
    at = snapshots[rounds]
    stale = []
    for k, (old, new) in enumerate(
        zip(eval_models(method, federation, at), eval_models(method, federation, at, "_fresh"))
    ):
        heard = last_heard(k, cohorts, rounds)
        for params, t in ((old, heard), (new, rounds)):
            want = snapshots[t].server["params"] | at.states[k]["head"]
            assert params.keys() == want.keys()
            assert all(torch.equal(params[n], want[n]) for n in want)
        stale.append(heard < rounds)
    assert rounds == 0 or 0 < sum(stale) < 5


def test_a_global_model_is_the_newest_for_all():
    method, federation, snapshots, _ = played("FedAvg")
    for params in eval_models(method, federation, snapshots[3]):
        assert params is snapshots[3].server["params"]


def scores(federation, models, t):
    "(generalised, personalised) accuracy of one model per client, by numpy and scikit-learn; `t` is the round's index"
    y = federation.data.test_y.numpy()
    pairs = []
    for params, concept, rows in zip(models, federation.label_maps(t), federation.partition.test):
        p = by_numpy(federation, params).argmax(1)
        pairs.append(
            (
                accuracy_score(concept[y], p),
                accuracy_score(concept[y[rows]], p[rows]) if len(rows) else np.nan,
            )
        )
    whole, own = np.array(pairs).T
    return 100 * whole.mean(), 100 * np.nanmean(own)


@pytest.mark.parametrize("name", ["FedAvg", "FedRep", "FedBABU", "FedDyn", "Ditto"])
def test_evaluate_names_every_accuracy(name):
    method, federation, snapshots, cohorts = played(name)
    assert (federation.label_maps(0) != federation.label_maps(1)).any()
    assert not len(federation.partition.test[0])
    for rounds, at in enumerate(snapshots):
        t = max(rounds - 1, 0)
        final = rounds == 4
        judged = eval_models(method, federation, at)
        tuned = None
        want = {"": judged}
        if final and (tuned := by_optim(method, federation, at, judged)):
            want = {"": tuned, "_untuned": judged}
        if name == "FedDyn":
            want["_selected"] = [at.server["selected"]] * 5
        if method.personal:
            want["_fresh"] = eval_models(method, federation, at, "_fresh")
        row = evaluate(method, federation, at, final)
        assert {n for n in row if "accuracy" in n} == {
            f"{kind}_accuracy{end}" for kind in ("generalised", "personalised") for end in want
        }
        for end, models in want.items():
            both = row[f"generalised_accuracy{end}"], row[f"personalised_accuracy{end}"]
            assert both == pytest.approx(scores(federation, models, t), abs=1e-9), (
                f"{name} after {rounds} rounds: {end}"
            )


@pytest.mark.parametrize("name", METHODS)
def test_what_was_predicted_before_changes_no_number(name):
    "An evaluator that remembers the last models' predictions, beside one that knows none"
    method, federation, snapshots, _ = played(name)
    remembers = Evaluator()
    for rounds, at in enumerate(snapshots):
        again, anew = (
            judge(method, federation, at, rounds == 4) for judge in (remembers, evaluate)
        )
        assert again == pytest.approx(anew, rel=0, abs=0, nan_ok=True)


def test_another_federation_is_not_judged_by_what_is_remembered():
    one = tiny()
    predict = Predictor()
    other = replace(one, data=replace(one.data, test_x=one.data.test_x.flip(0)))
    first = predict(one, [one.initial])[0]
    second = predict(other, [one.initial])[0]
    assert torch.equal(second, first.flip(0))
    assert not torch.equal(first, second)


def by_optim(method, federation, at, judged):
    "FedBABU's fine-tuning with a torch module and torch.optim.SGD; None for other methods"
    if type(method).__name__ != "FedBABU":
        return None
    out = []
    concepts = federation.label_maps(at.round - 1)
    for k, params in enumerate(judged):
        body = nn.Sequential(
            nn.Flatten(), nn.Linear(64, 12), nn.LeakyReLU(), nn.Linear(12, 6), nn.Linear(6, 10)
        ).double()
        with torch.no_grad():
            for p, t in zip(body.parameters(), params.values(), strict=True):
                p.copy_(t)
        step = torch.optim.SGD(
            body.parameters(), method.lr, method.momentum, weight_decay=method.weight_decay
        )
        rows = np.asarray(federation.partition.train[k])
        d = federation.data
        rng = np.random.default_rng([federation.seed, TUNE, at.round - 1, k])
        y = concepts[k][d.train_y.numpy()[rows]]
        plans = []
        for _ in range(method.finetune_epochs):
            order = rng.permutation(len(rows))
            batches = [
                order[i : i + method.batch_size] for i in range(0, len(rows), method.batch_size)
            ]
            plans += [(b, d.draw(len(b), rng)) for b in batches]
        for b, draws in plans:
            step.zero_grad()
            x = d.batch(
                d.train_x[rows[b]], None if draws is None else torch.as_tensor(draws), torch.float64
            )
            F.cross_entropy(body(x), torch.as_tensor(y[b])).backward()
            step.step()
        out.append({n: p.detach() for n, p in zip(params, body.parameters())})
    return out


def test_fine_tuning_is_torch_optims():
    method, federation, snapshots, _ = played("FedBABU")
    judged = eval_models(method, federation, snapshots[-1])
    ours = finetuned(method, federation, snapshots[-1], judged)
    for a, b, start in zip(
        ours, by_optim(method, federation, snapshots[-1], judged), judged, strict=True
    ):
        assert all(torch.allclose(a[n], b[n], rtol=0, atol=1e-12) for n in b)
        assert not torch.allclose(a["head.weight"], start["head.weight"])
    method, federation, snapshots, _ = played("FedAvg")
    assert finetuned(method, federation, snapshots[-1], judged) is None


class TunesByConstant(FedAvg, listed=False):
    "Fine-tunes with gradients that a constant of the phase doubles"

    def local_phases(self, client):
        tune = self.phase(
            client, "tune", final=True, constants=self.factors, adjust=self.multiplied
        )
        return [*super().local_phases(client), tune]

    def factors(self, client, results):
        return {"factor": 2.0}

    def multiplied(self, client, params, grads):
        return {n: client.constants["factor"] * g for n, g in grads.items()}


class TunesByRate(FedAvg, listed=False):
    "The same by twice the learning rate"

    def local_phases(self, client):
        tune = self.phase(client, "tune", lr=2 * self.lr, final=True)
        return [*super().local_phases(client), tune]


def test_a_final_phase_has_its_constants():
    federation = tiny()
    settings = dict(lr=0.05, momentum=0.0, weight_decay=0.0, epochs=1, batch_size=0)
    found = []
    for cls in (TunesByConstant, TunesByRate):
        method = cls(**settings)
        snapshot = next_round(method, federation, begin(method, federation))
        judged = eval_models(method, federation, snapshot)
        found.append(finetuned(method, federation, snapshot, judged))
    for ours, theirs in zip(*found):
        assert all(torch.allclose(ours[n], theirs[n], rtol=0, atol=1e-12) for n in ours)


class TunesFromTheFirst(FedAvg, listed=False):
    "Fine-tunes the model from which everybody started, in a second phase"

    def local_phases(self, client):
        start = lambda client, results: client.initial  # noqa: E731
        none = self.phase(client, "none", epochs=0, final=True, start=start)
        return [*super().local_phases(client), none, self.phase(client, "tune", final=True)]


def test_a_final_phase_starts_where_it_says():
    federation = tiny()
    method = TunesFromTheFirst(lr=0.05, momentum=0.0, weight_decay=0.0, epochs=1, batch_size=0)
    snapshot = next_round(method, federation, begin(method, federation))
    tuned = finetuned(method, federation, snapshot, eval_models(method, federation, snapshot))
    for k, ours in enumerate(tuned):
        client = federation.client(k, 0, {"params": federation.initial}, {}, TUNE)
        theirs = train(client, method.phase(client), federation.initial).params
        assert all(torch.allclose(ours[n], theirs[n], rtol=0, atol=1e-12) for n in ours)


def test_what_is_tuned_is_what_the_client_has_received():
    "A proximal term in a final phase ties to the model that is judged, not to one that was sent rounds ago"
    seen = []

    class TunesWithATie(FedAvg, listed=False):
        def local_phases(self, client):
            tune = self.phase(client, "tune", final=True, loss=self.tied)
            return [*super().local_phases(client), tune]

        def tied(self, client, params, batch):
            seen.append(client.received["params"])
            return self.loss(client, params, batch)

    federation = replace(tiny(), participation=0.34)
    method = TunesWithATie(lr=0.05, momentum=0.0, epochs=1, batch_size=0)
    snapshot = run(method, federation, 2).snapshot
    judged = eval_models(method, federation, snapshot)
    finetuned(method, federation, snapshot, judged)
    assert len(seen) == len(judged)
    assert all(received is model for received, model in zip(seen, judged))


def test_a_client_that_is_not_fine_tuned_keeps_its_model():
    class SomeTune(FedAvg, listed=False):
        def local_phases(self, client):
            phases = super().local_phases(client)
            if client.id:
                phases.append(self.phase(client, "tune", final=True))
            return phases

    federation = tiny()
    method = SomeTune(lr=0.05, momentum=0.0, epochs=1, batch_size=8)
    snapshot = next_round(method, federation, begin(method, federation))
    judged = eval_models(method, federation, snapshot)
    tuned = finetuned(method, federation, snapshot, judged)
    assert all(torch.equal(tuned[0][n], judged[0][n]) for n in judged[0])
    assert not torch.equal(tuned[1]["head.weight"], judged[1]["head.weight"])
    assert "generalised_accuracy_untuned" in evaluate(method, federation, snapshot, final=True)


def test_a_test_set_that_is_not_divided_has_no_personalised_accuracy():
    method = METHODS["FedAvg"]()
    federation = replace(tiny(), partition=replace(tiny().partition, test=None))
    assert [
        n for n in evaluate(method, federation, begin(method, federation)) if "accuracy" in n
    ] == ["generalised_accuracy"]


# --- over rounds and trials


@SOME
@given(st.lists(points, min_size=1, max_size=25))
@example([5.0])
@example([1.0] * 11)
@example([3.0] + [2.0] * 10)
def test_summaries_are_the_standard_librarys(values):
    rows = [{"round": t, "other": -v, "generalised_accuracy": v} for t, v in enumerate(values, 1)]
    found = summarise(rows)
    assert (found["last"], found["best"]) == (values[-1], sorted(values)[-1])
    assert found.keys() == {
        "last",
        "best",
        "mean_last_10",
    }
    assert found["mean_last_10"] == pytest.approx(
        statistics.fmean(list(reversed(values))[:10]), abs=1e-9
    )
    assert summarise(rows, "other")["best"] == -sorted(values)[0]


@SOME
@given(st.lists(points, min_size=1, max_size=15), points)
def test_fine_tuned_and_untuned_rounds_are_two_series(values, tuned):
    "The last row holds both; no best and no mean is of both kinds, and a frame that knows no fine-tuning is as it was"
    rows = [{"round": t, "a": v} for t, v in enumerate(values, 1)]
    last = [*rows[:-1], rows[-1] | {"a": tuned, "a_untuned": values[-1]}]
    framed = [{"a_untuned": math.nan} | r for r in last]  # as read from a file beside others
    for found in (last, framed):
        assert (
            summarise(found, "a_untuned")
            == summarise(rows, "a")
            == summarise([{"a_untuned": math.nan} | r for r in rows], "a")
        )
        mine = summarise(found, "a")
        assert mine["last"] == tuned
        assert (
            (len(values) == 1)
            == (not math.isnan(mine["best"]))
            == (not math.isnan(mine["mean_last_10"]))
        )
        best = max(values)
        for frame in map(pd.DataFrame, (found, rows)):
            assert to_target(frame, "a_untuned", best)["to_target"] == 1 + values.index(best)
            assert {str(std_of_last_rounds(frame, m)) for m in ("a", "a_untuned")} == {
                str(std_of_last_rounds(pd.DataFrame(rows), "a"))
            }
        assert to_target(pd.DataFrame(found), "a", tuned)["to_target"] == len(values)


@SOME
@given(st.lists(points, min_size=1, max_size=8), SEEDS)
def test_a_round_that_is_not_a_number_leaves_no_best(values, seed):
    "Whatever its place: a best of the others would hide it"
    values.insert(np.random.default_rng(seed).integers(len(values) + 1), math.nan)
    found = summarise([{"generalised_accuracy": v} for v in values])
    assert math.isnan(found["best"])
    assert math.isnan(found["mean_last_10"])
    assert math.isnan(found["last"]) == math.isnan(values[-1])


@SOME
@given(st.lists(points, max_size=12))
def test_mean_and_spread_are_the_standard_librarys(values):
    mean, std = mean_std(values)
    assert mean == pytest.approx(statistics.fmean(values), abs=1e-9) if values else math.isnan(mean)
    assert (
        std == pytest.approx(statistics.stdev(values), abs=1e-6)
        if len(values) > 1
        else math.isnan(std)
    )


@SOME
@given(st.lists(points, min_size=2, max_size=12), st.floats(0.5, 0.999))
def test_half_a_t_interval_is_scipys(values, level):
    low, high = (
        stats.ttest_1samp(values, 0.0).confidence_interval(level)
        if len(set(values)) > 1
        else (values[0],) * 2
    )
    assert half_width(values, level) == pytest.approx((high - low) / 2, abs=1e-6)


# --- FedCCFA's measures


@SOME
@given(SEEDS, st.integers(3, 8), st.integers(1, 6), st.booleans())
def test_madd_from_its_sum(seed, n, d, ties):
    "The mean absolute difference of cosines, pair by pair"
    rng = np.random.default_rng(seed)
    v = rng.normal(size=(n, d))
    if ties:
        v[rng.integers(n)] = v[0]
    s = np.array([[a @ b / np.linalg.norm(a) / np.linalg.norm(b) for b in v] for a in v])
    want = [
        [
            0.0
            if i == j
            else sum(abs(s[i, l] - s[j, l]) for l in range(n) if l not in (i, j)) / (n - 2)
            for j in range(n)
        ]
        for i in range(n)
    ]
    found = madd(torch.as_tensor(v)).numpy()
    assert np.allclose(found, want, atol=1e-12)
    assert np.array_equal(found, found.T)
    assert (found >= 0).all()
    assert (found <= 2 + 1e-12).all()


@SOME
@given(st.lists(st.integers(0, 50), min_size=1, max_size=12).filter(any))
@example([7])
@example([0, 3, 0])
@example([1] * 10)
def test_entropy_is_scipys(counts):
    "In nats, and of one class alone 0"
    assert float(label_entropy(torch.tensor(counts, dtype=torch.float64))) == pytest.approx(
        stats.entropy(counts), abs=1e-12
    )


@SOME
@given(SEEDS, st.integers(1, 6), st.integers(2, 9))
def test_cluster_scores_are_scikit_learns(seed, classes, n):
    rng = np.random.default_rng(seed)
    true, got = rng.integers(0, 3, (2, classes, n))
    got[0] = true[0]
    found = cluster_scores(torch.as_tensor(true), torch.as_tensor(got))
    each = [adjusted_rand_score(a, b) for a, b in zip(true, got)]
    same = [
        len(set(zip(a, b))) == len(set(a)) == len(set(b))
        for a, b in zip(true.tolist(), got.tolist())
    ]
    assert found["cluster_ari"] == pytest.approx(np.mean(each))
    assert found["perfect_classes"] == pytest.approx(100 * np.mean(same))
    assert found["clusters_per_class"] == pytest.approx(
        np.mean([len(np.unique(row)) for row in got])
    )


# --- one object a metric


@pytest.fixture
def worst():
    "The accuracy of the client that is off worst, as a metric of one's own"

    def lowest(predicted, test_y, label_maps, shares):
        own = [torch.as_tensor(concept)[test_y] for concept in label_maps]
        return 100 * min(float((p == y).double().mean()) for p, y in zip(predicted, own))

    metric = Metric("worst", "the lowest accuracy", "%", higher_is_better=True, compute=lowest)
    add_metric(metric)
    yield metric
    for name in [n for n in METRICS if n not in PACKAGE_METRICS]:
        del METRICS[name]


def test_what_is_said_of_every_metric():
    for name, metric in METRICS.items():
        assert metric.name == name
        assert metric.definition
        assert metric.label
        assert name in PACKAGE_METRICS
        assert metric.compute is None
        if metric.of:
            assert METRICS[metric.of].unit == metric.unit
            assert metric.words.startswith(metric.of)
        elif metric.unit:
            assert metric.words.startswith(f"{metric.unit}, ")
    accuracies = {n for n in METRICS if "accuracy" in n}
    assert {n for n, m in METRICS.items() if m.higher_is_better} == accuracies
    assert {n for n, m in METRICS.items() if m.unit == "%"} == accuracies
    assert {n for n, m in METRICS.items() if m.ratio} == {n for n in METRICS if n.startswith("lp_")}
    assert metric_named("unheard_of") == Metric("unheard_of")
    assert metric_named("unheard_of").label == "unheard of"


def test_a_metric_may_be_any_real_number():
    def value(answer):
        add_metric(Metric("own", compute=lambda predicted, test_y, label_maps, shares: answer))
        at = begin(FedAvg(), tiny())
        return evaluate(FedAvg(), tiny(), at)["own"]

    try:
        for given in (1, 1.0, np.float64(1), np.float32(1), np.int64(1), torch.tensor(1.0)):
            assert type(value(given)) is float
            assert value(given) == 1.0
        for given in (None, "1", True, 1j, torch.ones(2), np.bool_(True), [1.0]):
            with pytest.raises(InputError, match="metric 'own': compute: expected a number, got"):
                value(given)
    finally:
        for name in [n for n in METRICS if n not in PACKAGE_METRICS]:
            del METRICS[name]


BEST = {"accuracy": 0.0}


def best_so_far(predicted, test_y, label_maps, shares):
    BEST["accuracy"] = max(BEST["accuracy"], float(predicted[0]))
    return BEST["accuracy"]


def best_in_a_closure():
    best = 0.0

    def compute(predicted, test_y, label_maps, shares):
        nonlocal best
        best = max(best, float(predicted[0]))
        return best

    return compute


class BestOnItself:
    best = 0.0

    def __call__(self, predicted, test_y, label_maps, shares):
        self.best = max(self.best, float(predicted[0]))
        return self.best


@pytest.mark.parametrize(
    "compute, where",
    [
        (best_so_far, "metric own's global test_evaluation.BEST"),
        (best_in_a_closure(), "metric own's variable best"),
        (BestOnItself(), "metric own's BestOnItself"),
    ],
)
def test_a_metric_that_remembers_is_refused(compute, where):
    "The next run of a process would begin with it"
    given = {"predicted": [torch.ones(())], "test_y": None, "label_maps": None, "shares": None}
    with one_line(f"round 3: {where} has changed", "expected a number that follows"):
        own_value(compute, given, "own", 2)
    assert own_value(compute, given, "own", 3) == 1.0  # nothing changes any more


@pytest.mark.parametrize("name", [*RESERVED, "cka"])
def test_a_metric_has_a_name_of_its_own(name):
    with pytest.raises(InputError, match=f"metric {name!r}: .* choose another name"):
        add_metric(Metric(name, compute=lambda *what: 1.0))


def test_a_metric_takes_four_values():
    with pytest.raises(
        InputError, match=r"compute: expected a function of \(predicted, test_y, lab"
    ):
        add_metric(Metric("own", compute=lambda predicted, test_y, label_maps: 1.0))


@pytest.mark.parametrize(
    "change, line",
    [
        (lambda w: None, "FedAvg.eval_params returned None; expected a model"),
        (lambda w: {n: t for n, t in w.items() if n != "head.bias"}, "'head.bias' is missing"),
        (
            lambda w: w | {"head.bias": w["head.bias"][:1]},
            r"'head.bias' has the shape \(1,\), expected",
        ),
        (lambda w: w | {"head.bias": w["head.bias"].half()}, "'head.bias' has the type torch.fl"),
    ],
)
def test_a_model_that_is_not_whole_is_not_evaluated(change, line):
    method = with_hooks(
        FedAvg(), {"eval_params": lambda self, message, state: change(message["params"])}
    )
    with pytest.raises(InputError, match=line):
        evaluate(method, tiny(), begin(method, tiny()))


def test_a_method_s_own_metrics_are_numbers_under_names_of_their_own():
    def refused(metrics, line):
        method = with_hooks(FedAvg(), {"extra_metrics": lambda self, server: metrics})
        with pytest.raises(InputError, match=line):
            evaluate(method, tiny(), begin(method, tiny()))

    refused({"generalised_accuracy_untuned": 1.0}, "'generalised_accuracy_untuned' is in every row")
    refused({"own": "1"}, "FedAvg.extra_metrics: 'own': expected a number, got '1'")
    refused(None, "FedAvg.extra_metrics returned None; expected a dict of numbers")


def test_a_metric_of_ones_own_is_in_every_row_and_in_a_comparison(worst, tmp_path):
    tiny_run = dict(clients=3, rounds=2, epochs=1, batch_size=64, seeds=2, quiet=True)
    found = compare(["FedAvg", "pFedMe"], metric="worst", folder=tmp_path, **tiny_run)
    rows = found.frame
    assert rows.worst.notna().all()
    assert (rows.worst <= rows.generalised_accuracy + 1e-9).all()
    one_model = rows[rows.row == "FedAvg"]  # without drift the worst client is every client
    assert np.allclose(one_model.worst, one_model.generalised_accuracy)
    assert set(found.summary.metric) == {"worst"}
    assert "worst: %, the lowest accuracy" in repr(found)
    assert found.plot().axes[0].get_ylabel() == "worst (%)"


def test_a_metric_of_ones_own_reads_every_sort_of_models(worst):
    "A personal method's with the server's newest part, too, and those before a final fine-tuning"
    found = {}
    for name in ("pFedMe", "FedBABU"):
        method = METHODS[name]()
        federation = tiny()
        at = next_round(method, federation, begin(method, federation))
        found |= evaluate(method, federation, at, final=True)
    accuracies = {k.replace("generalised_accuracy", "") for k in found if "generalised" in k}
    assert {"", "_fresh", "_untuned"} == accuracies
    assert all(
        0 <= found[f"worst{end}"] <= found[f"generalised_accuracy{end}"] for end in accuracies
    )


@pytest.mark.parametrize(
    "change, word",
    [
        (dict(name="cka"), "the package has one of this name"),
        (dict(name="generalised_accuracy_fresh"), "the package has one of this name"),
        (dict(name="my metric"), "expected letters, digits"),
        (dict(compute=None), "expected a function"),
    ],
)
def test_a_metric_that_is_refused(worst, change, word):
    with pytest.raises(InputError, match=word):
        add_metric(replace(worst, **change))


def test_a_metric_that_returns_no_number_is_refused_in_the_first_round(worst, tmp_path):
    add_metric(replace(worst, compute=lambda *given: "high"))
    found = compare(
        ["FedAvg"], clients=3, rounds=2, epochs=1, seeds=1, quiet=True, folder=tmp_path
    ).report.failed
    assert len(found) == 1
    assert "metric 'worst': compute: expected a number" in str(found)


def subtracts(predicted, test_y, label_maps, shares):
    for p in predicted:
        p -= test_y  # 0 where it is right
    return float((predicted[0] == 0).double().mean())


def shifts_labels(predicted, test_y, label_maps, shares):
    test_y.numpy()[:] += 1
    return 0.0


def shifts_maps(predicted, test_y, label_maps, shares):
    label_maps += 1
    return 0.0


def shifts_shares(predicted, test_y, label_maps, shares):
    shares[1][:] += 1
    return 0.0


@pytest.mark.parametrize(
    "compute, entry",
    [
        (subtracts, "predicted, 0"),
        (shifts_labels, "test_y"),
        (shifts_maps, "label_maps"),
        (shifts_shares, "shares, 1"),
    ],
)
def test_a_metric_that_writes_into_what_it_was_given_is_refused_and_spoils_nothing(
    worst, compute, entry
):
    federation = tiny()
    at = begin(METHODS["FedAvg"](), federation)
    evaluator = Evaluator()
    before = evaluator(METHODS["FedAvg"](), federation, at)
    add_metric(replace(worst, compute=compute))
    with pytest.raises(InputError) as error:
        evaluator(METHODS["FedAvg"](), federation, at)
    line = (
        f"round 1: metric 'worst': compute changed what it was given in place ({entry}); expected"
    )
    assert str(error.value).startswith(line)
    add_metric(worst)
    assert evaluator(METHODS["FedAvg"](), federation, at) == before
