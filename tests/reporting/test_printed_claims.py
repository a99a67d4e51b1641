"Claims, headlines and the scoreboard in words, in every format"

import pytest
import toy
import toy_board
import toy_claims
from toy import written
from toy_claims import CSV, RAW, claim, only, put

from fedrepro.experiments.specs import load_spec
from fedrepro.reporting.grids import shown
from fedrepro.reporting.printed_claims import (
    board_sheet,
    claims_in_words,
    claims_sheet,
    headline_sentences,
    interval,
    speed_in_words,
    verdict_in_words,
)
from fedrepro.reporting.printed_tables import written_frame
from fedrepro.verdicts.claims import verdicts
from fedrepro.verdicts.headlines import headlines, paper_headline
from fedrepro.verdicts.scoreboard import scoreboard

demo = toy_claims.demo
board = toy_board.demo


def words(demo, tier="paper"):
    "The one claim as csv has it"
    return claims_in_words(verdicts(tier, root=demo)).iloc[0]


# --- claims


def test_the_words_of_a_claim(demo):
    assert words(demo).verdict == "not tested yet"
    put(demo, FedAvg=[70.0, 70.4, 69.8], FedCCFA=[75.0, 75.2, 74.7])
    found = words(demo)
    assert found.verdict == "cannot be tested yet: IFCA is missing"
    assert found.why == "not run: IFCA"
    put(demo, IFCA=[72.0, 72.1, 71.9])
    assert words(demo).verdict == "supported"
    assert verdict_in_words(only(demo)).startswith("supported (p < 0.001")
    put(demo, FedCCFA=[70.3, 71.0, 69.9])  # above FedAvg, below IFCA
    assert verdict_in_words(only(demo)).startswith("contradicted (p = 0.0")
    put(demo, FedCCFA=[75.0, 71.0, 72.3])
    assert words(demo).verdict.startswith("undecided (p = 0.")


def test_a_claim_says_who_diverged(demo):
    put(demo, FedAvg=[70.0, 70.4, 69.8], IFCA=[72.0, None, 71.9], FedCCFA=[75.0, 75.2, 74.7])
    assert words(demo).why == "diverged: IFCA (1 of 3 seeds)"
    put(demo, FedCCFA=[75.0, None, 74.7])
    assert words(demo).verdict == "cannot be tested yet: FedCCFA diverged (1 of 3 seeds)"


def test_one_seed_and_equal_seeds_have_no_test(demo):
    put(demo, FedCCFA=[90.0], FedAvg=[50.0], IFCA=[60.0])
    assert words(demo).verdict == "cannot be tested yet: 1 of 3 seeds"
    assert interval(only(demo)) == "+30.00 (1)"
    put(demo, FedCCFA=[90.0] * 3, FedAvg=[50.0] * 3, IFCA=[60.0] * 3)
    assert words(demo).verdict == "cannot be tested yet: no spread over seeds"
    put(demo, tier="small", FedCCFA=[90.0, 90.3], FedAvg=[50.0, 50.3], IFCA=[60.0, 60.3])
    assert words(demo, "small").verdict == "not judged (reduced)"


@pytest.mark.parametrize("format", ["text", "md", "html", "csv"])
def test_every_format_has_every_claim(demo, format):
    def printed(root):
        found = verdicts("paper", root=root)
        return shown(claims_sheet(found, "paper"), format, claims_in_words(found))

    out = printed(demo)
    assert "best of all" in out
    assert "not tested yet" in out
    empty = printed(demo / "nothing")
    assert empty.strip()
    assert "best of all" not in empty


# --- headlines


def test_a_headline_in_a_sentence(demo):
    "the numbers are those of test_claims.py"
    text = claim(headline='"FedCCFA leads"', caveat='"Made up."')
    (demo / "demo/claims.toml").write_text(text)
    idle = paper_headline("demo", root=demo)
    assert headline_sentences(idle) == "FedCCFA leads (text 1): not tested yet (A). Made up."
    put(demo, FedAvg=[60.0, 60.4, None], FedCCFA=[75.0, 75.2, 74.7, 99.0])
    half = headline_sentences(paper_headline("demo", root=demo))
    assert "cannot be tested yet: IFCA is missing. 1 of its 2 comparisons has runs, on A." in half
    assert half.endswith(
        "published +0.00. FedAvg diverged in 1 of 3 seeds and is compared over the others. Made up."
    )
    put(demo, IFCA=[70.0, 70.4, 69.8])
    found = paper_headline("demo", root=demo)
    assert headline_sentences(found) == (
        "FedCCFA leads (text 1): supported on A. The smallest gain: 74.97 against IFCA's 70.07, gain +4.90 [4.65, 5.15] over 3 shared seeds, published +0.00. "
        "The 95 % interval of the gain lies above 0 in 2 of 2 comparisons, below 0 in none. Supported: p = 0.002. "
        "FedAvg diverged in 1 of 3 seeds and is compared over the others. Made up."
    )


def test_a_headline_says_what_the_last_ten_evaluations_say(demo):
    """FedCCFA leads all but its last round: 9 of ten at 80, so 78 and 78.1 over the last ten, 60 and 61 at the end

    Over IFCA, which has two seeds, 6 and 5.7: 5.85 ± 12.706 * .2121 / sqrt(2) = 1.91"""
    twelve = RAW["columns"][0] | dict(rounds=12, source="paper 1")
    written(demo, RAW | dict(columns=[twelve]), "demo/t", CSV)
    (demo / "demo/claims.toml").write_text(claim(headline='"FedCCFA leads"'))
    spec = load_spec("demo/t", demo)
    toy.put(
        spec, "paper", "FedCCFA", [[0.0] * 2 + [80.0] * 9 + [end] for end in (60.0, 61.0, 62.0)]
    )
    toy.put(spec, "paper", "FedAvg", [[70.0] * 12, [70.2] * 12, [70.1] * 12])
    assert "last ten" not in headline_sentences(paper_headline("demo", root=demo))  # IFCA lacks
    toy.put(spec, "paper", "IFCA", [[72.0] * 12, [72.4] * 12, None])
    said = headline_sentences(paper_headline("demo", root=demo))
    assert said.startswith("FedCCFA leads (text 1): contradicted on A. ")
    assert "Contradicted: p = 0.004." in said
    assert "gain -11.70" in said
    over = "the smallest gain is +5.85 [3.94, 7.76], over IFCA."
    assert f"Over the last ten evaluations (not judged) {over}" in said


def test_a_headline_of_which_one_column_is_run_names_the_columns(demo):
    "The one that its comparisons are from, and the other as what is missing, not the paper's own method"
    b = {"label": "B", "published": {"column": "B"}, "source": "paper 1", "rounds": 5}
    written(demo, RAW | dict(columns=[RAW["columns"][0], b]), "demo/t", CSV)
    (demo / "demo/claims.toml").write_text(claim(headline='"FedCCFA leads"', columns='["A", "B"]'))
    put(demo, FedAvg=[60.0, 60.4, 60.2], FedCCFA=[75.0, 75.2, 75.1], IFCA=[70.0, 70.4, 70.2])
    said = headline_sentences(paper_headline("demo", root=demo))
    assert "cannot be tested yet: B is missing. 2 of its 4 comparisons have runs, on A. " in said
    spec = load_spec("demo/t", demo)
    for row, value in dict(FedAvg=60.0, FedCCFA=65.0, IFCA=70.0).items():
        step = 0.1 if row == "FedCCFA" else 0.2
        ends = (value, value + step, value + 2 * step)
        toy.put(spec, "paper", row, [[end] * 5 for end in ends], "B")
    said = headline_sentences(paper_headline("demo", root=demo))
    assert "contradicted on A; B. The smallest gain, on B: 65.10 against IFCA's 70.20" in said
    assert "lies above 0 in 3 of 4 comparisons, below 0 in 1. Contradicted: p < 0.001." in said


def test_a_headline_names_a_rival_with_fewer_seeds(demo):
    (demo / "demo/claims.toml").write_text(claim(headline='"FedCCFA leads"'))
    put(
        demo,
        FedAvg=[60.0, 60.4, 59.9],
        FedCCFA=[75.0, 75.2, 74.7, 75.1],
        IFCA=[70.0, 70.4, 69.8, 70.2],
    )
    said = headline_sentences(paper_headline("demo", root=demo))
    assert "FedAvg is compared over 3 seeds." in said
    assert "IFCA is compared" not in said


def test_a_headline_that_waits_for_seeds_says_nothing_of_intervals(demo):
    (demo / "demo/claims.toml").write_text(claim(headline='"FedCCFA leads"'))
    put(demo, FedAvg=[60.0, 60.4], FedCCFA=[75.0, 75.2], IFCA=[77.0, 77.201])
    said = headline_sentences(paper_headline("demo", root=demo))
    assert said.startswith(
        "FedCCFA leads (text 1): cannot be tested yet: 2 of 3 seeds. All of its 2 comparisons have"
    )
    assert "77.10, gain -2.00 over 2 shared seeds" in said and "interval" not in said


def test_one_seed_says_nothing_of_intervals(demo):
    (demo / "demo/claims.toml").write_text(claim(headline='"FedCCFA leads"'))
    put(demo, FedCCFA=[90.0], FedAvg=[50.0], IFCA=[60.0])
    said = headline_sentences(paper_headline("demo", root=demo))
    assert "1 of 3 seeds. All of its 2 comparisons have runs on A. The smallest gain: 90.00" in said


def test_a_paper_may_have_further_headlines(demo):
    "Each is printed; the first is the one that its page opens with"
    further = claim(headline='"FedCCFA leads again"', says='"again"')
    (demo / "demo/claims.toml").write_text(claim(headline='"FedCCFA leads"') + further)
    found = headlines(root=demo)
    assert [h.claim for h in found] == ["FedCCFA leads", "FedCCFA leads again"]
    assert paper_headline("demo", root=demo).claim == "FedCCFA leads"
    frame = verdicts("paper", root=demo)
    sheet = shown(claims_sheet(frame, "paper", found), "text", frame)
    assert all(f"{h.claim} (" in " ".join(sheet.split()) for h in found)


def test_a_headline_that_states_a_value_names_it(demo):
    "round 2: 74, 74.2 and 73.7, so 73.97 - 80 = -6.03 ± 4.3027 * 0.2517 / sqrt(3) = 0.63"
    line = "Demo,Fig5,FedCCFA,A,s,accuracy_pct at round 2,80.0,,"
    header = "paper,table,method,dataset,setting,metric,mean,std,note"
    (demo / "claims.csv").write_text(f"{header}\n{line}\n")
    (demo / "demo/claims.toml").write_text(
        """
        [[claim]]
        listed = {paper = "Demo"}
        headline = "FedCCFA has 80"
        kind = "at round"
        spec = "demo/t"
        rows = ["FedCCFA"]
        columns = ["A"]
        rounds = 2
        """
    )
    put(demo, FedCCFA=[75.0, 75.2, 74.7])
    assert headline_sentences(paper_headline("demo", root=demo)) == (
        "FedCCFA has 80 (Figure 5): contradicted on A: 73.97 against the stated 80.00, difference -6.03 [-6.66, -5.41] over 3 seeds. "
        "Contradicted: p < 0.001."
    )


def test_a_headline_about_rounds_counts_each_side_s_own(demo):
    "FedAvg ends at 70; FedCCFA is there in rounds 2, 3 and 2, IFCA in 5, 5 and 4: 3, 2 and 2 later"
    text = claim(
        headline='"FedCCFA is fastest"',
        kind='"fewer rounds"',
        against='["FedAvg"]',
        unit='"rounds"',
    )
    (demo / "demo/claims.toml").write_text(text)
    spec = load_spec("demo/t", demo)
    late = [40, 50, 60, 65, 69, 70]
    toy.put(spec, "paper", "FedAvg", [late] * 3, "A")
    rounds = {"FedCCFA": (2, 3, 2), "IFCA": (5, 5, 4)}
    for row, first in rounds.items():
        toy.put(spec, "paper", row, [[50.0] * (r - 1) + [71.0] * (7 - r) for r in first], "A")
    assert (
        " The smallest gain: 2.33 rounds against IFCA's 4.67, gain +2.33 [0.90, 3.77] over 3 shared seeds. "
    ) in headline_sentences(paper_headline("demo", root=demo))


# --- the scoreboard


def test_what_a_number_costs_in_words():
    assert "none decided yet" in speed_in_words(0, 3.0)
    assert speed_in_words(2, float("nan")).endswith("2; their runs hold no times")
    words = speed_in_words(1, 0.5)
    assert words.endswith("2.0 (1 in 0.5 hours; which of them ran side by side is not stored)")
    assert "hour of a process" in words


def test_any_tier_has_a_heading(board):
    found = scoreboard(tiers=("smoke",), root=board)
    sheet = board_sheet(found, root=board)
    assert "Published numbers, tier smoke: run, not judged" in shown(sheet, "text", found)


@pytest.mark.parametrize("format", ["text", "md", "html", "csv"])
def test_formats(board, format):
    toy_board.put(board, "FedAvg", [70.0, 70.5])
    found = scoreboard(root=board)
    out = shown(board_sheet(found, root=board), format, written_frame(found))
    assert "consistent" in out
    assert "nobody has the data" in out
    if format != "csv":
        assert "5 in 2 tables" in out
