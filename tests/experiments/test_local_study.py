"Studies of one client: the measures against other ways to compute them, the client, and a study as a run like any other"

import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from sklearn.metrics import recall_score
from torch import nn

from fedrepro.cli.main import main
from fedrepro.core.errors import Damaged, InputError
from fedrepro.core.folders import find_specs
from fedrepro.core.trees import distance
from fedrepro.data import datasets, partition
from fedrepro.engine.client import client_round
from fedrepro.engine.federation import Federation
from fedrepro.engine.forks import run_forked
from fedrepro.engine.method import load_methods
from fedrepro.engine.rounds import open_round, run
from fedrepro.experiments import store
from fedrepro.experiments.jobs import make_jobs
from fedrepro.experiments.local_study import (
    assigned,
    chosen,
    local_rows,
    position,
    sample_rows,
    point_on_line,
    slice_rows,
)
from fedrepro.experiments.rules import Value, parse_client
from fedrepro.experiments.runner import compute_runs
from fedrepro.experiments.runs import make_method, run_settings
from fedrepro.engine.rows import STUDY_METRICS
from fedrepro.experiments.specs import load_spec
from fedrepro.experiments.studies import check_study, conclude, prelude
from fedrepro.methods.fedbss import rate_samples, split
from fedrepro.models import networks
from fedrepro.models.net import Net, Network
from fedrepro.reporting.figures import draw
from fedrepro.reporting.printed_tables import start_notes
from fedrepro.verdicts.summaries import starts
from fedrepro.verdicts.tables import UNKNOWN_VALUE, cell_line, table
from toy import stored
from test_resume import Killed, killing, run_job

LOCAL = dict(lr=0.05, epochs=2, batch_size=16)
METHODS = {
    "FedAvg": {},
    "FedProx": {"mu": 0.1},
    "FedAvgM": {"beta": 0.5},
    "MOON": {"mu": 1.0},
    "LfD": {},
    "FedBSS": {"warm_up": 0},
    "Constraint": {"kind": "parameter", "part": "classifier", "mu": 0.1},
}
STUDIES = (
    "lfd/table5",
    "lfd/figure1",
    "lfd/figure3",
    "lfd/figure4",
    "fedbss/figure2",
    "fedbss/figure3a",
    "fedbss/figure3b",
    "fedbss/figure3c",
)


@pytest.fixture(scope="module")
def toy():
    "Six clients of few digits in float64, the median one with classes 0 to 4 alone"
    d = datasets.load("digits")
    d = replace(
        d,
        train_x=d.train_x[:360],
        train_y=d.train_y[:360],
        test_x=d.test_x[:120],
        test_y=d.test_y[:120],
    )
    cut = partition.partition("dirichlet-class", d.train_y.numpy(), clients=6, seed=1, alpha=0.5)
    half = assigned(cut, d.train_y.numpy(), "classes 0-4", 0)
    return Federation(d, networks.network("digits_cnn"), half, dtype=torch.float64)


def client_after(toy, method, rounds=3, client="classes 0-4"):
    "The client in the round after some of FedAvg's"
    w = run(made("FedAvg", epochs=5), toy, rounds).snapshot.server["params"]
    k = position(toy.partition, client)
    return toy.client(
        k,
        rounds,
        method.broadcast(method.init_server(toy) | {"params": w}),
        method.init_client(toy, k),
    )


def made(name, **more):
    return load_methods()[name](**LOCAL | METHODS[name] | more)


# --- the client


def test_a_client_that_cannot_be_is_refused():
    labels = np.repeat([0, 1], 50)
    cut = partition.partition("iid", labels, clients=2, seed=0)
    for client, says in (
        ("client 2", "clients 0 to 1"),
        ("classes 1-0", "comes after"),
        ("one", "neither like"),
        ("classes 0-2", "no sample of class 2"),
        ("classes 7-9", "others have only 0"),
    ):
        with pytest.raises(InputError, match=says):
            assigned(cut, labels, client, 0)
    assert parse_client("client 3") == (3, range(0))
    assert parse_client("classes 2-4") == (
        None,
        range(2, 5),
    )


def test_halves_by_loss_are_passed_as_often_as_all(toy):
    client = client_after(toy, made("FedAvg"))
    loss = rate_samples(client)[0].cpu().numpy()
    larger = chosen(client, "larger losses")
    smaller = chosen(client, "smaller losses")
    assert len(larger) == len(smaller) == client.n
    assert not set(larger) & set(smaller)
    assert len(set(larger)) == len(set(smaller)) == client.n // 2
    assert loss[smaller].max() <= loss[larger].min() < loss[larger].max()
    assert np.ptp(np.bincount(smaller)[np.unique(smaller)]) <= 1


# --- rows


@pytest.mark.parametrize("name", METHODS)
def test_at_the_start_nothing_has_changed_and_at_the_end_it_is_the_clients_model(toy, name):
    method = made(name, epochs=3)
    client = client_after(toy, method)
    rows = local_rows(method, toy, client)
    assert [r["epoch"] for r in rows] == [0, 1, 2, 3]
    first = rows[0]
    last = rows[-1]
    assert first["lp_existing"] == first["lp_absent"] == 1
    assert abs(first["cka"] - 1) < 1e-12
    assert (
        max(
            abs(first[key])
            for key in ("kl", "kl_reverse", "drift_norm", "gap_majority", "gap_minority")
        )
        < 1e-12
    )
    assert last["kl"] > 1e-6
    assert last["cka"] < 1 - 1e-6
    assert last["drift_norm"] > 1e-3
    sent = client_round(method, client_after(toy, method))[0]["params"]  # what it would upload
    assert last["drift_norm"] == distance(sent, client.received["params"])
    z = method.logits(toy.net, sent, toy.data.batch(toy.data.test_x, None, torch.float64))
    y = toy.data.test_y
    assert last["generalised_accuracy"] == pytest.approx(
        100 * float((z.argmax(1) == y).double().mean()), abs=1e-9
    )
    few = client.counts == 0
    assert few.tolist() == [False] * 5 + [True] * 5
    assert last["accuracy_absent"] == pytest.approx(
        100 * recall_score(y, z.argmax(1), average=None)[5:].mean()
    )
    assert last["gap_majority"] == pytest.approx(
        np.mean(
            [
                last[f"confidence_{c}"] - first[f"confidence_{c}"]
                for c in range(10)
                if client.counts[c] >= client.n / 10
            ]
        )
    )
    made_when_read = {"lp_means_existing", "lp_means_absent"}
    assert {m.name for m in STUDY_METRICS} - {*last} == {
        "test_loss",
        "unbiased_share",
        "rank_correlation",
    } | made_when_read


def test_lfd_predicts_with_the_softmax_that_it_trains(toy):
    method = made("LfD", weight=0.0, margin=0.0)
    client = client_after(toy, method)
    batch = client.batch(np.arange(client.n))
    w = client.received["params"]
    assert method.loss(client, w, batch).item() == pytest.approx(
        F.cross_entropy(method.logits(toy.net, w, batch.x), batch.y).item(), abs=1e-12
    )
    assert torch.equal(
        method.logits(toy.net, w, batch.x).argmax(1),
        toy.net(method.eval_params({"params": w}, {}), batch.x).argmax(1),
    )
    assert torch.equal(made("FedAvg").logits(toy.net, w, batch.x), toy.net(w, batch.x))


def test_a_slice_ends_at_the_clients_model(toy):
    rows = slice_rows(made("FedAvg"), toy, client_after(toy, made("FedAvg")), "all")
    end = local_rows(made("FedAvg"), toy, client_after(toy, made("FedAvg")), "all")[-1]
    assert [rows[-1][key] for key in ("along", "drift_norm", "generalised_accuracy")] == [
        1,
        end["drift_norm"],
        end["generalised_accuracy"],
    ]
    received = client_after(toy, made("FedAvg")).received["params"]
    x = toy.data.batch(toy.data.test_x, None, torch.float64)
    assert rows[10]["test_loss"] == pytest.approx(
        F.cross_entropy(toy.net(received, x), toy.data.test_y).item(), abs=1e-12
    )


def test_a_slice_of_a_batch_normalisation_goes_no_further_than_its_ends(toy):
    "Its variance is kept between the two: on the line beyond them it would be negative, and the loss no number"

    def normalised():
        body = nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.BatchNorm1d(12), nn.ReLU())
        return Network(body, nn.Linear(12, 10))

    federation = replace(toy, net=Net("normalised", normalised))
    method = made("FedAvg", lr=0.5, epochs=3, batch_size=8)
    client = client_after(federation, method, rounds=1)
    rows = slice_rows(method, federation, client)
    assert all(math.isfinite(row["test_loss"]) for row in rows)
    start = {"w": torch.tensor([1.0, 2.0]), "v": torch.tensor([1.0, 4.0])}
    end = {"w": torch.tensor([3.0, 2.0]), "v": torch.tensor([5.0, 4.0])}
    before = point_on_line(start, end, ("w",), -1.0)
    halfway = point_on_line(start, end, ("w",), 0.5)
    assert before["w"].tolist() == [-1.0, 2.0]
    assert before["v"].tolist() == [1.0, 4.0]
    assert [t.tolist() for t in halfway.values()] == [[2.0, 2.0], [3.0, 4.0]]


def test_sample_rows_are_the_losses_uncertainties_and_gradients_of_plain_torch(toy):
    client = client_after(toy, made("FedAvg"))
    rows = sample_rows(client)
    w = client.received["params"]
    batch = next(client.chunks(client.n, augment=False))
    own = {n: t.clone().requires_grad_() for n, t in w.items()}
    loss = F.cross_entropy(toy.net(own, batch.x), batch.y, reduction="none")
    p = toy.net(w, batch.x).softmax(1)
    u = 1 - (p.max(1).values - p.min(1).values)
    norms = [
        torch.cat(
            [g.flatten() for g in torch.autograd.grad(one, list(own.values()), retain_graph=True)]
        ).norm()
        for one in loss
    ]
    order = np.argsort(loss.detach().numpy(), kind="stable")
    for key, want in (
        ("loss", loss.detach()),
        ("uncertainty", u),
        ("gradient_norm", torch.stack(norms)),
    ):
        assert np.allclose([r[key] for r in rows], want.numpy()[order], atol=1e-10), key
    unbiased, biased = split(loss.detach().numpy(), u.numpy())
    assert [r["biased"] for r in rows] == [0] * len(unbiased) + [1] * len(biased)
    assert {r["unbiased_share"] for r in rows} == {len(unbiased) / client.n}
    assert [r["sample"] for r in rows] == list(range(client.n))


# --- settings


def test_no_other_run_has_the_part_study():
    for name in find_specs():
        spec = load_spec(name)
        for tier in spec.tiers:
            assert {"study" in c.settings for c in spec.runs(tier)} <= {name in STUDIES}, name


def settings(row="FedAvg", **more):
    values = (
        dict(
            rounds=20,
            dataset="digits",
            recipe="plain",
            network="digits_cnn",
            partition="dirichlet-class",
            clients=4,
            alpha_dirichlet=0.5,
        )
        | more
    )
    return run_settings(make_method(row, values, "here"), values, 0, "here")


@pytest.mark.parametrize(
    "study, stray",
    [
        (dict(study="samples", study_rounds=[2]), dict(study_epochs=1)),
        (dict(study="samples", study_rounds=[2]), dict(start_accuracy=99.0)),
        (dict(study="samples", study_rounds=[2]), dict(study_samples="all")),
        (dict(study="local", study_epochs=1), dict(study_rounds=[2])),
    ],
)
def test_settings_of_another_study_are_refused(study, stray):
    study |= dict(study_client="client 0")
    assert "study" in settings(**study)
    says = f"here: {[*stray][0]} is given, but the study {study['study']} has none"
    with pytest.raises(InputError, match=says):
        settings(**study | stray)


# --- a run like any other


def small(name, row=None, **changes):
    "A run of a spec at the smoke tier on few samples; `changes` go into the part `study`"
    spec = load_spec(name)
    planned = next(c for c in spec.runs("smoke", row and [row], seeds=1))
    data = planned.settings["data"] | {"train_samples": 300, "test_samples": 100}
    s = planned.settings | {
        "data": data,
        "network": "digits_cnn",
        "rounds": 3,
        "study": planned.settings["study"] | changes,
    }
    return replace(planned, settings=s)


def test_a_study_is_stored_found_again_and_resumed_to_the_same_bits(tmp_path, monkeypatch):
    runs = [
        small("lfd/figure1", row, epochs=2)
        for row in ("Parameter constraint: all", "Feature constraint: all", "No constraint")
    ]
    assert [len(p) for p in make_jobs(runs)] == [3]
    opened = []
    monkeypatch.setattr(
        "fedrepro.engine.rounds.open_round",
        lambda *a: opened.append(a[2].round) or open_round(*a),
    )
    whole = [store.read(p) for p in run_job(runs, tmp_path / "whole")]
    assert opened == [0, 1, 2], "one federation is computed more than once"
    alone = [store.read(run_job([c], tmp_path / "alone")[0])[1] for c in runs]
    assert [rows for _, rows in whole] == alone
    assert len({str(rows[-1]) for rows in alone}) == 3
    assert all(
        [(r["round"], r["epoch"]) for r in rows] == [(3, 0), (3, 1), (3, 2)] for rows in alone
    )
    real = conclude
    calls = []

    def dies(planned, active):
        calls.append(planned.row)
        if len(calls) == 2:
            raise Killed
        real(planned, active)

    monkeypatch.setattr("fedrepro.experiments.studies.conclude", dies)
    with pytest.raises(Killed):
        run_job(runs, tmp_path / "killed", checkpoint_rounds=1)
    monkeypatch.undo()
    rounds = []
    again = [
        store.read(p)
        for p in run_job(runs, tmp_path / "killed", tell=lambda i, t: rounds.append(t))
    ]
    assert [rows for _, rows in again] == alone and rounds == [3, 3, 3], (
        "the federation was computed again"
    )
    assert [h["resumed"][0]["round"] for h, _ in again] == [3, 3, 3]
    before = [p.stat().st_mtime_ns for p in (tmp_path / "whole").rglob("*.jsonl")]
    assert (
        compute_runs(runs, tmp_path / "whole", quiet=True).summary() == "0 computed, 3 were there"
    )
    assert before == [p.stat().st_mtime_ns for p in (tmp_path / "whole").rglob("*.jsonl")]


def test_a_study_that_was_killed_in_its_federation_goes_on(tmp_path):
    planned = small("fedbss/figure3b", rounds=[1, 3])
    _, rows = store.read(run_job([planned], tmp_path / "whole")[0])
    with pytest.raises(Killed):
        run_job([planned], tmp_path / "killed", checkpoint_rounds=1, tell=killing(2))
    head, again = store.read(run_job([planned], tmp_path / "killed")[0])
    assert again == rows
    assert head["resumed"][0]["round"] == 1
    assert {r["round"] for r in rows} == {1, 3}
    assert {r["epoch"] for r in rows} == {0}


def test_the_federation_goes_on_until_it_knows_every_class(tmp_path):
    "It ends at the first round with the accuracy, and at least so much on every class; a note says what was asked"
    asked = {
        floor: small("lfd/table5", "FedAvg", accuracy=1.0, class_accuracy=floor)
        for floor in (0.01, 99.9)
    }
    method = asked[0.01].settings["method"]
    fast = dict(
        rounds=8,
        partition=dict(recipe="iid", clients=5, seed=0),  # else no model knows every class so soon
        method=method | {"fields": method["fields"] | {"lr": 0.1}},
    )
    asked = {
        floor: replace(planned, settings=planned.settings | fast)
        for floor, planned in asked.items()
    }
    runs = {
        floor: store.read(run_job([planned], tmp_path)[0])[1] for floor, planned in asked.items()
    }
    least = {
        floor: min(v for k, v in rows[0].items() if k.startswith("accuracy_") and k[9:].isdecimal())
        for floor, rows in runs.items()
    }
    assert least[0.01] >= 0.01
    assert 1 < runs[0.01][0]["round"] < runs[99.9][0]["round"] == 8
    assert least[99.9] < 99.9
    active = prelude(asked[0.01], None, "cpu", "")
    run_forked([active])
    before = [row["least_class_accuracy"] for row in active.history.rows]
    assert len(before) == runs[0.01][0]["round"]
    assert all(v < 0.01 for v in before[:-1])
    assert before[-1] == pytest.approx(least[0.01])
    long = store.load_results(tmp_path / "smoke")
    notes = "; ".join(
        start_notes(starts([(r, long[long.run_id == r.run_id]) for r in asked.values()]))
    )
    assert "asked for 1 % and 0.01 % on every class" in notes
    assert "asked for 1 % and 99.9 % on every class" in notes
    assert notes.count("not reached") == 1


def test_divergence_of_the_federation_and_of_the_client_is_recorded(tmp_path):
    planned = small("lfd/table5", "FedAvg", accuracy=1.0)
    fields = planned.settings["method"]["fields"]
    hot = planned.settings["method"] | {"fields": fields | {"lr": 1e6}}
    head, rows = store.read(
        run_job([replace(planned, settings=planned.settings | {"method": hot})], tmp_path)[0]
    )
    assert head["status"] == "diverged"
    assert head["diverged"]["round"] == 1
    assert rows == []
    start = planned.settings["study"] | {"start": planned.settings["method"]}
    head, rows = store.read(
        run_job(
            [replace(planned, settings=planned.settings | {"method": hot, "study": start})],
            tmp_path,
        )[0]
    )
    k = head["diverged"]["client"]
    assert head["status"] == "diverged"
    assert head["diverged"]["round"] == 1
    assert 0 <= k < 5
    assert [r["epoch"] for r in rows] == [0]
    assert rows[0]["drift_norm"] == 0


def test_rows_that_are_no_study_are_neither_written_nor_read(tmp_path):
    planned = small("lfd/table5", "FedAvg", accuracy=1.0)
    head, rows = store.read(run_job([planned], tmp_path)[0])
    assert store.decode(store.encode(head, rows))[1] == rows
    wrong = {
        "last row is of local epoch": rows[:-1],
        "row after round": rows[::-1],
        "last row is of local": [],
        "is no metric": [rows[0] | {"drift": 1.0}, *rows[1:]],
        "row after round 1, epoch 0": [rows[0], rows[1] | {"epoch": 9}],
    }
    for says, bad in wrong.items():
        with pytest.raises(Damaged, match=says):
            store.encode(head, bad)
    with pytest.raises(Damaged, match="row after round"):
        store.encode(head, [{k: v for k, v in r.items() if k != "epoch"} for r in rows])


# --- tables and the command line


def test_a_ratio_is_judged_by_its_own_margin():
    "1.02, 1.03, 1.04: SE = 0.01 sqrt(4/3), so PI = 4.303 SE = 0.0497 and E = |D| + 2.920 SE = |D| + 0.0337; margin 0.05"
    spec = load_spec("lfd/table5")
    runs = pd.DataFrame(
        [
            dict(
                seed=s,
                run_ids=(str(s),),
                status="complete",
                diverged="",
                last=v,
                best=v,
                mean_last_10=v,
                rounds=100,
                rounds_std=0.0,
            )
            for s, v in enumerate((1.02, 1.03, 1.04))
        ]
    )
    words = {
        p: cell_line(spec, "paper", runs, UNKNOWN_VALUE | {"mean": p}, spec.margin)["verdict"]
        for p in (1.04, 1.05, 1.07, 1.09)
    }
    assert words == {
        1.04: "reproduced",
        1.05: "consistent",
        1.07: "consistent",
        1.09: "contradicted",
    }


def test_run_table_and_figure_from_the_command_line(tmp_path, capsys):
    "Pays for the federations from which two studies start"
    where = ["--tier", "smoke", "--results", str(tmp_path)]
    assert (
        main(
            [
                "run",
                "lfd/table5",
                *where,
                "--methods",
                "FedAvg,LfD",
                "--seeds",
                "1",
                "--quiet",
                "--workers",
                "1",
            ]
        )
        == 0
    )
    text = capsys.readouterr().out
    assert "lp_existing" in text
    assert "lp_absent" in text
    assert "starting models, asked for 75 %: FedAvg, seed 0" in text
    frame = table(load_spec("lfd/table5"), "smoke", tmp_path).set_index(["column", "row"])
    # two readings of LP
    groups = {f"{name}_{group}" for name in ("lp", "lp_means") for group in ("existing", "absent")}
    assert set(frame.metric) == groups
    assert frame.n.sum() == 8
    rows = {
        h["settings"]["method"]["class"]: r for h, r in map(store.read, tmp_path.rglob("*.jsonl"))
    }
    # these are made in reading
    for (column, row), line in frame[
        (frame.n > 0) & ~frame.metric.str.startswith("lp_means")
    ].iterrows():
        assert line["mean"] == rows[row][-1][f"lp_{column.split()[0]}"]
    assert len(rows) == 2, "both columns of Table 5 are one run, and so is Figure 4"
    assert main(["figure", "lfd/figure4", *where, "--out", str(tmp_path / "four.png")]) == 0
    assert (tmp_path / "four.png").stat().st_size > 5000
    assert main(["figure", "lfd/figure1", *where]) == 2
    assert "no finished run" in capsys.readouterr().err


@pytest.mark.parametrize("name", STUDIES)
def test_every_study_can_be_run_at_every_tier_that_has_its_data(name):
    "Pays for what its runs share at tier smoke, once a row"
    spec = load_spec(name)
    for tier in ("smoke", "small", "paper"):
        runs = spec.runs(tier)
        assert {r.row for r in runs} == set(spec.rows)
        assert not [c for c in spec.tier_columns(tier) if c.missing]
        assert len({r.run_id for r in runs}) == len(spec.rows) * len({r.seed for r in runs})
    for planned in {r.run_id: r for r in spec.runs("smoke", seeds=1)}.values():
        check_study(planned, None, "cpu")


def two_columns(name, tmp_path, **of_epoch):
    "A study at tier smoke, whose second column has other clients, with a made-up run of each row"
    spec = load_spec(name)
    first = spec.tier_columns("smoke")[0]
    other = replace(
        first, label="more clients", values=first.values | {"clients": Value(7, "tier: a test")}
    )
    spec = replace(
        spec, tiers=spec.tiers | {"smoke": replace(spec.tier("smoke"), columns=(first, other))}
    )
    for c in spec.runs("smoke", seeds=1):
        last = c.settings["study"].get("epochs", 0)
        rows = [
            dict(
                round=c.rounds,
                epoch=e,
                drift_norm=float(c.settings["partition"]["clients"]),
                gap_majority=0.1,
                gap_minority=0.0,
            )
            | of_epoch
            for e in (0, last)
        ]
        stored(c, rows, tmp_path)
    return spec, draw(spec, "smoke", tmp_path), [first.label, "more clients"]


def test_a_study_of_two_settings_shows_both_and_two_readings_of_one_run_once(tmp_path):
    spec, fig, labels = two_columns("fedbss/figure3a", tmp_path, along=1, test_loss=1.0)
    assert [ax.get_title() for ax in fig.axes[::2]] == labels
    assert [bar.get_width() for ax in fig.axes[::2] for bar in ax.patches] == [10.0] * 3 + [7.0] * 3
    spec, fig, labels = two_columns(
        "lfd/figure3", tmp_path, samples_0=1, samples_1=2, confidence_0=0.1, confidence_1=0.1
    )
    assert [ax.get_title() for ax in fig.axes] == labels
    assert len(fig.legends[0].get_texts()) == len(spec.rows)
    assert len(draw(load_spec("lfd/figure3"), "smoke", tmp_path).axes) == 1
