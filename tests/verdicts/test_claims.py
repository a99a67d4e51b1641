"Claims: the tests against scipy, the state of a claim, and what makes none"

import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from fedrepro.core.errors import InputError
from fedrepro.core.folders import find_specs
from fedrepro.experiments.rules import read_published_csv
from fedrepro.experiments.specs import load_spec
from fedrepro.reporting.printed_claims import state_in_words
from fedrepro.verdicts import claims
from fedrepro.verdicts.claims import (
    CANNOT,
    Claim,
    Comparison,
    decisive,
    examine_claim,
    joint,
    load_stored_runs,
    read_claims,
    verdicts,
)
from fedrepro.verdicts.independent import Kind, Reason
from toy import ROOT, one_line, written
from toy_claims import CSV, ONE, RAW, claim, demo, only, put

LINES = read_published_csv(ROOT / "papers/claims.csv")


# --- the numbers


def test_joint():
    assert joint([0.01, 0.2], "all") == 0.2
    assert math.isclose(joint([0.01, 0.2], "any"), 0.02)
    assert joint([0.9, 0.8], "any") == 1


def test_the_smallest_or_the_largest_difference_decides():
    low = Comparison("low", differences={0: 1.0, 1: 2.0})
    high = Comparison("high", differences={0: 5.0, 1: 6.0})
    assert decisive([high, low], "all") is low
    assert low.mean == 1.5
    assert decisive([low, high], "any") is high
    assert high.mean == 5.5
    assert math.isclose(low.half, stats.t.ppf(0.975, 1) * 0.5, rel_tol=1e-9)


# --- what is claimed


def test_every_listed_claim_is_checked_once_and_its_numbers_are_untouched():
    found = read_claims()
    listed = [c for c in found if c.listed]
    assert len(LINES) == len(listed) == 11
    assert sorted(c.published for c in listed) == sorted(LINES["mean"])
    assert {c.paper for c in found if c.headline} == {"FedADC", "FedBSS", "FedCCFA", "FedDC", "LfD"}
    assert all(math.isnan(c.published) for c in found if not c.listed)
    assert not any("claims" in name for name in find_specs())


def test_every_claim_names_rows_and_columns_that_exist():
    for c in read_claims():
        spec = load_spec(c.spec)
        assert set(c.rows) | set(c.against) <= set(spec.rows), c.says
        assert set(c.columns) <= {col.label for col in spec.columns} and c.columns, c.says
        if c.reduced:
            assert set(c.reduced) <= {col.label for col in spec.tier_columns("small")}, c.says


@pytest.mark.parametrize(
    "change, word",
    [
        ('kind = "gain over all others"', 'kind = "guess"'),
        ('rows = ["FedCCFA"]', 'rows = "FedCCFA"'),
        ('source = "text 1"', 'sauce = "text 1"'),
        ('source = "text 1"\n', ""),
        ('paper = "Demo"', 'listed = {paper = "Demo"}'),
        ('columns = ["A"]', 'columns = ["A"]\nneed = "some"'),
        (ONE, "claim = 3"),
        (ONE, "claim = [3]"),
        ("[[claim]]", "[[clam]]"),
    ],
)
def test_bad_claims_are_refused_in_one_line(demo, change, word):
    (demo / "demo/claims.toml").write_text(ONE.replace(change, word))
    with one_line("demo"):
        read_claims(demo)


def test_a_margin_is_refused_where_no_value_is_stated(demo):
    (demo / "demo/claims.toml").write_text(ONE + "margin = 1.0\n")
    with one_line("margin: expected a claim of the kind at round or within rounds"):
        verdicts(root=demo)


@pytest.mark.parametrize(
    "change, word",
    [
        (dict(rows='["FedDCC"]'), "FedCCFA"),
        (dict(against='["IFCAA"]'), "IFCA"),
        (dict(metric='"acuracy"'), "generalised_accuracy"),
        (dict(metric='"test_loss"'), "expected one of which more is better, got test_loss"),
        (dict(kind='"fewer rounds"'), "against"),
        (
            dict(
                kind='"gain over"',
                rows='["FedCCFA", "FedAvg", "IFCA"]',
                against='["FedAvg", "IFCA"]',
            ),
            "against",
        ),
    ],
)
def test_claims_that_their_spec_does_not_fit_are_refused(demo, change, word):
    (demo / "demo/claims.toml").write_text(claim(**change))
    with pytest.raises(InputError, match=f"claim 'best of all'.*{word}"):
        verdicts(root=demo)


def test_a_claim_of_the_list_that_nobody_checks_or_two_do_is_refused(demo):
    (demo / "claims.csv").write_text(
        "paper,table,method,dataset,setting,metric,mean,std\nDemo,T,M,D,S,gain,2.5,\n"
    )
    with pytest.raises(InputError, match="checked 0 times"):
        read_claims(demo)
    listed = ONE.replace(
        'paper = "Demo"\nsource = "text 1"\nsays = "best of all"', 'listed = {paper = "Demo"}'
    )
    (demo / "demo/claims.toml").write_text(listed)
    assert read_claims(demo)[0].published == 2.5
    assert read_claims(demo)[0].listed
    (demo / "demo/claims.toml").write_text(listed * 2)
    with pytest.raises(InputError, match="checked 2 times"):
        read_claims(demo)


# --- verdicts


def test_supported_contradicted_and_undecided(demo):
    # not the extra row
    assert only(demo).state == "not tested yet"
    assert only(demo).comparisons == 2
    put(demo, FedAvg=[70.0, 70.4, 69.8], IFCA=[72.0, 72.1, 71.9], FedCCFA=[75.0, 75.2, 74.7])
    found = only(demo)
    assert (found.state, found.n) == ("supported", 3)
    assert "IFCA" in found["at"]
    assert math.isclose(found.effect, np.mean([3.0, 3.1, 2.8]))
    assert found.p_holm < 0.01
    put(demo, FedCCFA=[70.3, 71.0, 69.9])  # above FedAvg, below IFCA
    found = only(demo)
    assert found.state == "contradicted"
    assert found.effect < 0
    assert found.p_opposite_holm < 0.05
    put(demo, FedCCFA=[75.0, 71.0, 72.3])
    assert only(demo).state == "undecided"
    assert 0.05 < only(demo).p_holm < 1


def test_named_rivals_are_the_only_rivals(demo):
    "a control beside the methods that a claim is about is nobody's rival"
    (demo / "demo/claims.toml").write_text(claim(against='["FedAvg"]'))
    put(demo, FedAvg=[70.0, 70.4, 69.8], IFCA=[79.0, 79.1, 78.9], FedCCFA=[75.0, 75.2, 74.7])
    assert only(demo).comparisons == 1
    assert only(demo).state == "supported"


def test_one_seed_cannot_be_tested(demo):
    put(demo, FedCCFA=[90.0], FedAvg=[50.0], IFCA=[60.0])
    found = only(demo)
    assert (found.state, found.lacks) == (CANNOT, (Reason(Kind.FEWER_SEEDS, (), (1, 3)),))
    assert found.effect == 30.0
    assert math.isnan(found.p)
    assert math.isnan(found.half)


def test_a_spec_that_asks_for_one_seed_has_nothing_to_test(demo):
    one_seed = RAW | dict(base=RAW["base"] | dict(seeds=[0]))
    written(demo, one_seed, "demo/t", CSV)
    put(demo, FedCCFA=[90.0], FedAvg=[50.0], IFCA=[60.0])
    found = only(demo)
    assert (found.state, found.lacks) == (CANNOT, (Reason(Kind.ONE_SEED),))


def test_a_claim_waits_for_the_seeds_that_its_spec_asks_for(demo):
    "two seeds whose differences happen to be alike would be contradicted with p < 0.001, and have no interval to show"
    put(demo, FedAvg=[80.0, 82.0], IFCA=[83.0, 85.0], FedCCFA=[81.0, 83.001])
    found = only(demo)
    assert (found.state, found.lacks) == (CANNOT, (Reason(Kind.FEWER_SEEDS, (), (2, 3)),))
    assert math.isclose(found.effect, -1.9995)
    assert found.n == 2
    assert np.isnan([found.half, found.p, found.p_opposite, found.p_holm]).all()
    assert state_in_words(found.state, found.lacks) == f"{CANNOT}: 2 of 3 seeds"
    put(demo, FedAvg=[80.0, 82.0, 81.0], IFCA=[83.0, 85.0, 84.0], FedCCFA=[81.0, 83.001, 81.9])
    assert only(demo).state == "contradicted"
    assert only(demo).half > 0


def test_rivals_that_lack_seeds_are_named(demo):
    put(demo, FedAvg=[70.0, 70.4, 69.8], IFCA=[72.0], FedCCFA=[75.0, 75.2, 74.7])
    found = only(demo)
    assert found.lacks == (Reason(Kind.FEWER_SEEDS, ("IFCA",), (1, 3)),)
    assert state_in_words(found.state, found.lacks) == f"{CANNOT}: IFCA with 1 of 3 seeds"
    assert found.compared == 2


def test_a_seed_that_diverged_is_not_waited_for(demo):
    put(demo, FedAvg=[70.0, 70.4, None], IFCA=[72.0, 72.1, 71.9], FedCCFA=[75.0, 75.2, 74.7])
    assert only(demo).state == "supported"


def test_the_row_that_sets_a_target_needs_its_seeds_too(demo):
    (demo / "demo/claims.toml").write_text(claim(kind='"fewer rounds"', against='["FedAvg"]'))
    put(demo, FedAvg=[70.0, 70.4], IFCA=[72.0, 72.1, 71.9], FedCCFA=[75.0, 75.2, 74.7])
    assert only(demo).lacks[0] == Reason(Kind.FEWER_SEEDS, ("FedAvg",), (2, 3))


def test_seeds_are_paired(demo):
    "seeds vary by ten points, the gain by a tenth: only a paired test can see it; a seed of one side alone is left out"
    put(demo, FedAvg=[60.0, 70.0, 80.0], IFCA=[60.0, 70.0, 80.0, 99.0], FedCCFA=[61.0, 71.1, 80.9])
    assert only(demo).state == "supported"
    assert only(demo).n == 3


def test_a_rival_that_is_not_run_is_named(demo):
    put(demo, FedAvg=[70.0, 70.4, 69.8], FedCCFA=[75.0, 75.2, 74.7])
    found = only(demo)
    assert (found.state, found.lacks) == (CANNOT, (Reason(Kind.LACKING, ("IFCA",), (1, 2)),))
    assert found.reasons == (Reason(Kind.NOT_RUN, ("IFCA",)),)
    assert math.isnan(found.p)


def test_who_diverged_is_said(demo):
    put(demo, FedAvg=[70.0, 70.4, 69.8], IFCA=[72.0, None, 71.9], FedCCFA=[75.0, 75.2, 74.7])
    found = only(demo)
    assert found.state == "supported"
    assert found.reasons == (Reason(Kind.DIVERGED, ("IFCA",), (1, 3)),)
    assert found.compared == 2
    # of the two seeds left
    assert (found["at"], found.n) == ("FedCCFA against IFCA, A", 2)
    assert math.isclose(found.effect, 2.9)
    # one seed cannot be tested, and does not stop the test of the others
    put(demo, IFCA=[72.0, None, None])
    assert only(demo).state == "supported"
    assert only(demo).compared == 1
    assert only(demo).reasons[0].seeds == (2, 3)
    put(demo, FedCCFA=[75.0, None, 74.7])
    assert only(demo).state == CANNOT
    assert only(demo).lacks == (Reason(Kind.DIVERGED, ("FedCCFA",), (1, 3)),)


def test_reduced_tiers_are_shown_and_not_judged(demo):
    put(
        demo,
        tier="small",
        FedCCFA=[90.0, 90.3, 89.9],
        FedAvg=[50.0, 50.3, 49.9],
        IFCA=[60.0, 60.3, 59.9],
    )
    found = only(demo, "small")
    assert found.state == "not judged"
    assert round(found.effect) == 30
    assert only(demo).state == "not tested yet"
    with pytest.raises(InputError, match="'big'.*paper, small"):
        verdicts("big", root=demo)


def test_holm_counts_the_claims_of_a_paper(demo):
    (demo / "demo/claims.toml").write_text(ONE + claim(columns='["B"]'))
    for column in "AB":
        put(
            demo,
            column,
            FedAvg=[70.0, 70.4, 69.8],
            IFCA=[71.0, 71.9, 70.5],
            FedCCFA=[75.0, 75.2, 74.7],
        )
    found = verdicts(root=demo)
    assert np.allclose(found.p_holm, 2 * found.p)
    assert set(found.state) == {"supported"}


def test_any_needs_one_and_all_needs_all(demo):
    put(demo, FedCCFA=[75.0, 75.2, 74.7], FedAvg=[70.0, 70.4, 69.8], IFCA=[80.0, 80.1, 79.6])
    text = claim(kind='"gain over"', rows='["FedCCFA", "FedCCFA"]', against='["FedAvg", "IFCA"]')
    (demo / "demo/claims.toml").write_text(text)
    assert only(demo).state == "contradicted"
    (demo / "demo/claims.toml").write_text(text + 'need = "any"\n')
    found = only(demo)
    assert found.state == "supported"
    assert math.isclose(found.effect, np.mean([5, 4.8, 4.9]))


@pytest.mark.parametrize(
    "kind, rounds, stated, word",
    [
        ("at round", 2, 73.2, "supported"),
        ("at round", 2, 75.2, "contradicted"),
        ("at round", 3, 74.9, "undecided"),
        ("within rounds", 6, 74.0, "supported"),
        ("within rounds", 2, 75.5, "contradicted"),
    ],
)
def test_values_at_a_round(demo, kind, rounds, stated, word):
    "the curve ends at v and is v-1 in round 2"
    put(demo, FedCCFA=[75.0, 75.2, 74.7])
    claim = Claim(
        "Demo", "x", "y", kind, "demo/t", ("FedCCFA",), ("A",), published=stated, rounds=rounds
    )
    runs = load_stored_runs(load_spec("demo/t", demo), "paper")
    [found] = claims.settle([examine_claim(claim, runs)])
    assert found.state == word
    last = 0 if rounds > 2 or kind == "within" else 1
    assert math.isclose(found.effect, np.mean([75.0, 75.2, 74.7]) - last - stated)
    [wide] = claims.settle([examine_claim(replace(claim, margin=3.0), runs)])
    assert wide.state == "supported"
    assert math.isclose(wide.effect, found.effect)


def test_fewer_rounds_to_the_references_last_accuracy(demo):
    "FedAvg ends at 70; FedCCFA is there in round 2, IFCA never (one round more than the last); a seed that it lacks is left out"
    claim = Claim(
        "Demo",
        "x",
        "y",
        "fewer rounds",
        "demo/t",
        ("FedCCFA",),
        ("A",),
        against=("FedAvg",),
        unit="rounds",
    )
    put(demo, FedAvg=[70.0] * 3, curve=[40, 50, 60, 65, 69, 70])
    put(demo, IFCA=[60.0] * 4, curve=[40, 50, 60, 60, 60, 60])
    put(demo, FedCCFA=[75.0] * 4, curve=[60, 70, 72, 73, 74, 75])
    spec = load_spec("demo/t", demo)
    found = claims.fewer_rounds(claim, load_stored_runs(spec, "paper"))
    assert {c.label.split(" against ")[1]: set(c.differences.values()) for c in found} == {
        "FedAvg, A": {4.0},
        "IFCA, A": {5.0},
    }
    assert {(c.row, c.rival, c.column, c.mine[0], c.theirs[0]) for c in found} == {
        ("FedCCFA", "FedAvg", "A", 2.0, 6.0),
        ("FedCCFA", "IFCA", "A", 2.0, 7.0),
    }
    examined = examine_claim(claim, load_stored_runs(spec, "paper"))
    assert (examined.state, examined.lacks) == (CANNOT, (Reason(Kind.NO_SPREAD),))


def test_values_are_of_models_of_one_kind_or_of_none():
    run = pd.DataFrame(
        {"round": [1, 2, 3], "a": [50.0, 60.0, 90.0], "a_untuned": [math.nan, math.nan, 55.0]}
    )
    assert [claims.first_round(run, m, 55.0) for m in ("a", "a_untuned")] == [3.0, 2.0]
    assert claims.first_round(run, "a", 95.0) == 4.0
    assert math.isnan(claims.first_round(run, "b", 55.0)), "not measured is not: not reached"
    assert claims.best_within("a_untuned", 3)(run) == 60.0
    assert math.isnan(claims.at_round("a", 2)(run))
    assert math.isnan(claims.best_within("b", 3)(run))
    assert math.isnan(claims.at_round("b", 1)(run))


def test_a_column_that_its_spec_does_not_have_is_refused(demo):
    (demo / "demo/claims.toml").write_text(claim(columns='["A", "C"]'))
    with one_line("claim 'best of all': column 'C' is unknown; accepted: A, B"):
        verdicts("paper", root=demo)


def test_what_is_out_of_reach_is_that_of_the_same_folder(demo):
    (demo / "reach.toml").write_text('[data]\ndigits = "its archive cannot be downloaded"\n')
    found = only(demo)
    assert found.state == CANNOT
    assert str(found.lacks[0]) == "no data here: digits"
