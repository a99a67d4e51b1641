"""Partitions and concepts: what no lesson covers. Refusals, and the sizes of FedCCFA's real data sets. (Any labels and any
request whatever: test_input.py.)"""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from fedrepro.core.errors import InputError
from fedrepro.core.folders import find_specs
from fedrepro.data.concept_drift import DriftSchedule, Swap, drift, drift_names, flip_labels
from fedrepro.data.partition import (
    PARTITIONS,
    Partition,
    class_counts,
    fedccfa_cohort,
    partition,
    partition_recipe,
    recipe_names,
)
from fedrepro.experiments.specs import load_spec
from test_real_data import present
from toy import one_line

DIGITS = np.arange(200) % 10


@pytest.mark.parametrize("recipe", sorted({*recipe_names()} - {"natural"}))
def test_seeds_and_the_test_set(recipe):
    "Another seed is another partition; asking for test shares does not change the training lists"
    given = {"quantity-skew": {"alpha": 0.5}, "dirichlet-class-5": {"per_class": 2}}.get(recipe, {})
    one, two = (partition(recipe, DIGITS, clients=5, seed=s, **given) for s in (0, 1))
    both = partition(recipe, DIGITS, DIGITS, clients=5, seed=0, **given)
    assert one.fingerprint != two.fingerprint != both.fingerprint
    assert Partition(both.train).fingerprint == one.fingerprint
    before = np.random.get_state()[1].copy()
    partition(recipe, DIGITS, clients=5, **given)
    assert (np.random.get_state()[1] == before).all(), "the global generator was touched"


# --- refusals, one of a kind


@pytest.mark.parametrize(
    "recipe, changed, says",
    [
        ("idd", {}, "did you mean 'iid'"),
        ("iid", {"alpha": 0.5}, "'alpha'"),
        ("iid", {"clients": 2.0}, "whole number"),
        ("iid", {"clients": 201}, "from 1 to 200"),
        ("iid", {"classes": 9}, "classes"),
        ("dirichlet-client", {"alpha": "small"}, "alpha"),
        ("dirichlet-class", {"tries": 10**4 + 1}, "tries: .* to 10000"),
        ("dirichlet-class", {"alpha": 1e-6, "minimum": 45, "tries": 50}, "no draw of 50"),
        ("dirichlet-class", {"minimum": 51}, "200"),
        ("dirichlet-class-5", {"per_class": 6}, "need 24"),
        ("dirichlet-class-5", {"alpha": 1e-5}, "too small"),
        (
            "dirichlet-class-5",
            {"per_class": 0, "per_class_test": 0, "alpha": 0.01, "clients": 20},
            "no training sample",
        ),
        ("sort", {"clients": 4, "shards": 2}, "classes"),
        ("sort", {"shards": 51}, "blocks"),
        ("shards", {"shards": 51}, "from 1 to 50"),
        ("quantity-skew", {}, "either"),
        ("natural", {}, "has no groups"),
        (
            "natural",
            {"groups": (DIGITS % 3, DIGITS)},
            r"groups \[3, 4, 5, 6, 7\] have no training sample; number those",
        ),
        ("natural", {"clients": 5, "groups": (DIGITS % 3 * 2, DIGITS % 3)}, "no training sample"),
    ],
)
def test_refused(recipe, changed, says):
    with pytest.raises(InputError, match=says) as refused:
        partition(recipe, DIGITS, DIGITS, **{"clients": 4, **changed})
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "make, says",
    [
        (lambda: partition("iid", [0.0, 1.0], clients=1), "class numbers"),
        (lambda: Partition([[0, 0]], None), "two owners"),
        (lambda: Partition([[0], [1]], [[0]]), "one test list per client, got 1 for 2"),
        (lambda: flip_labels(DIGITS, 1.1, 10, np.random.default_rng(0)), "1.1"),
        (lambda: drift("recurrent", clients=10, classes=10), "reoccurring"),
        (lambda: drift("sudden", clients=10, classes=6), "from 7"),
        (lambda: drift("sudden", clients=10, classes=10).label_maps(-1), "round"),
        (lambda: Swap(0, [0], (1, 1)), "twice"),
        (lambda: DriftSchedule("own", 2, 3, ["a"]), "not a list of Swap"),
        (lambda: DriftSchedule("own", 10**5, 10**3), "more than 10000000 labels"),
        (lambda: DriftSchedule("own", 2, 3, [Swap(0, [2], (0, 1))]), "2 clients"),
        (lambda: DriftSchedule("own", 2, 3, [Swap(0, [1], (0, 3))]), "3 classes"),
    ],
)
def test_lists_labels_and_drifts_refused(make, says):
    with pytest.raises(InputError, match=says):
        make()


# --- a recipe of one's own


def own(counts, name="own"):
    "The partition of 200 digits, 20 of each, among 4 clients, and of 100 for tests, by a table of counts"
    partition_recipe(name)(lambda per_class, clients, rng: counts)
    try:
        return partition(name, DIGITS, DIGITS[:100], clients=4)
    finally:
        del PARTITIONS[name]


def test_what_a_recipe_leaves_over_is_nobodys():
    "Neither in training nor in the test set, where a client has the same share of each class"
    split = own(np.tile([4] * 2 + [2] * 8, (4, 1)))
    assert split.sizes.tolist() == [24] * 4
    assert (class_counts(split.test, DIGITS, 10) == [2] * 2 + [1] * 8).all()
    one_class = own(np.tile([5] + [0] * 9, (4, 1)))
    assert class_counts(one_class.test, DIGITS, 10).sum(0).tolist() == [10] + [0] * 9


@pytest.mark.parametrize(
    "counts, says",
    [
        (np.full((4, 10), 6), "gives away 24 samples of class 0; expected at most the 20"),
        (np.full((4, 10), 2**62), "samples of class 0; expected at most the 20"),
        (np.full((4, 10), -1), "whole numbers from 0"),
        (np.full((4, 10), 1.0), "whole numbers from 0"),
        (np.ones((5, 10), int), "one row for each of 4 clients"),
        ([[1] * 10, [1] * 9], "one column for each of 10 classes"),
        (None, "returned None"),
    ],
)
def test_a_table_that_cannot_be_dealt(counts, says):
    with one_line("partition 'own': its recipe", says):
        own(counts)


def test_a_recipe_of_ones_own_is_called_with_all_generators_seeded():
    "As in a stored run: NumPy's global generator gives the same shares for the same seed, and is left as it was"

    def by_shares(per_class, clients, rng):
        shares = np.random.dirichlet(np.ones(clients), size=len(per_class)).T
        return np.floor(shares * per_class).astype(int)

    partition_recipe("by_shares")(by_shares)
    try:
        before = np.random.get_state()[1].copy()
        first, again, other = (
            partition("by_shares", DIGITS, clients=4, seed=seed) for seed in (1, 1, 2)
        )
        assert (np.random.get_state()[1] == before).all()
    finally:
        del PARTITIONS["by_shares"]
    assert first.fingerprint == again.fingerprint != other.fingerprint


def test_test_labels_count_for_the_classes():
    cut = partition("iid", [0, 1], [0, 1, 2], clients=2)
    assert cut.settings["classes"] == 3
    assert class_counts(cut.test, np.array([0, 1, 2]), 3).sum() == 3


# --- label noise and concept drift


def test_a_map_given_away_is_a_copy():
    s = drift("sudden", clients=10, classes=10, at=0)
    s.label_maps(0)[:] = 0
    assert s.label_maps(0)[0].tolist() == [0, 2, 1, 3, 4, 5, 6, 7, 8, 9]
    assert s == drift("sudden", clients=10, classes=10, at=0)


@pytest.mark.parametrize("name", drift_names())
def test_drift_with_few_clients(name):
    s = drift(name, clients=2, classes=10, at=1)
    assert s.change_rounds == {"none": (), "reoccurring": (1, 51)}.get(name, (1,))
    assert (s.label_maps(999)[:, 3:] == np.arange(3, 10)).all(), (
        "groups without a client swap nothing"
    )


# --- real labels: FedCCFA's client sizes, seeds 0 to 2


@pytest.mark.parametrize(
    "clients, alpha, sizes",
    [
        (20, 0.5, (881, 2585, 4665)),
        (20, 0.1, (83, 1988, 6776)),
        (100, 0.5, (148, 477, 1141)),
        (100, 0.1, (50, 377, 3002)),
        (100, 0.01, (50, 53, 4559)),
    ],
)
def test_fedccfa_sizes_on_cifar10(clients, alpha, sizes):
    "The sizes (min, median, max) of the released code"
    labels = present("CIFAR-10").train_y.numpy()
    cuts = [
        partition("dirichlet-class-5", labels, clients=clients, alpha=alpha, seed=s)
        for s in range(3)
    ]
    ours = np.concatenate([cut.sizes for cut in cuts])
    assert (ours.min(), int(np.median(ours)), ours.max()) == sizes
    assert all(cut.counts(labels).min() >= 5 and cut.sizes.sum() == 50_000 for cut in cuts)


# --- what FedCCFA's released code draws: tests/golden/fedccfa_cohorts.json

GOLDEN = json.loads((Path(__file__).parents[1] / "golden/fedccfa_cohorts.json").read_text())
# training and test samples of each class
SORTED = {"Fashion-MNIST": (6000, 1000), "CIFAR-10": (5000, 1000)}


@pytest.mark.parametrize("which", GOLDEN)
def test_cohorts_of_the_released_code(which):
    "All 200 rounds, in drawn order. Only the sizes of the test lists move the stream, so sorted labels do as well as the real ones"
    name = which.split(", ")[0]
    alpha = float(which.split()[-1])
    train, test = (np.repeat(np.arange(10), n) for n in SORTED[name])
    split = partition("dirichlet-class-5", train, test, clients=100, alpha=alpha)
    drawn = GOLDEN[which]["cohorts_in_drawn_order"]
    assert len(drawn) == 200
    assert split.sizes.tolist() == GOLDEN[which]["train_sizes"]
    assert [fedccfa_cohort(split, 20, t) for t in range(200)] == drawn


@pytest.mark.parametrize("which", GOLDEN)
def test_partitions_of_the_released_code(which):
    "sha256 over the sorted lists as json, of the official labels in their order"
    name = which.split(", ")[0]
    alpha = float(which.split()[-1])
    d = present(name)
    split = partition(
        "dirichlet-class-5", d.train_y.numpy(), d.test_y.numpy(), clients=100, alpha=alpha
    )
    for lists, key in ((split.train, "train_sha256"), (split.test, "test_sha256")):
        content = json.dumps([np.sort(rows).tolist() for rows in lists])
        assert hashlib.sha256(content.encode()).hexdigest() == GOLDEN[which][key]


def test_other_partitions_have_no_such_cohorts():
    labels = np.arange(400) % 10
    for split in (
        partition("iid", labels, labels, clients=10),
        partition("dirichlet-class-5", labels, clients=4),
    ):
        with pytest.raises(InputError, match="cohorts 'fedccfa-code'"):
            fedccfa_cohort(split, 2, 0)


def test_every_paper_run_with_100_clients_has_these_cohorts():
    runs = [
        r
        for name, path in find_specs().items()
        if name.startswith("fedccfa/")
        for r in load_spec(path).runs("paper")
    ]
    hundred = [r for r in runs if r.settings["partition"]["clients"] == 100]
    assert len(hundred) > 300
    assert {r.settings.get("cohorts") for r in hundred if r.row != "FedAvg, other cohorts"} == {
        "fedccfa-code"
    }
    assert not any("cohorts" in r.settings for r in runs if r not in hundred)


def test_a_partition_keeps_its_own_positions():
    "One array that is shuffled again and again makes another partition each time"
    rng = np.random.default_rng(0)
    rows = np.arange(20)
    made = []
    expected = []
    for _ in range(3):
        rng.shuffle(rows)
        made.append(Partition(np.split(rows, 2), np.split(rows, 2)))
        expected.append([mine.copy() for mine in np.split(rows, 2)])
    assert len({one.fingerprint for one in made}) == 3
    for one, lists in zip(made, expected):
        for mine, tested, there in zip(one.train, one.test, lists):
            assert np.array_equal(mine, there)
            assert np.array_equal(tested, there)
