"Headlines: what a paper is about, as values"

import math

import pandas as pd
import pytest

from fedrepro.core.errors import InputError
from fedrepro.verdicts.headlines import headlines, paper_headline
from fedrepro.verdicts.independent import Kind, Reason
from toy import ROOT
from toy_claims import claim, demo, put


def test_a_headline_as_values(demo):
    "paired seeds 0 to 2: 5.0, 4.8, 4.9 over IFCA; t(.975, 2) = 4.3027, so 4.9 ± 4.3027 * 0.1 / sqrt(3) = 0.248"
    text = claim(headline='"FedCCFA leads"', caveat='"Made up."')
    (demo / "demo/claims.toml").write_text(text)
    idle = paper_headline("demo", root=demo)
    assert (idle.tested, idle.state, idle.ours, idle.published) == (
        False,
        "not tested yet",
        None,
        0.0,
    )
    assert idle.caveat == "Made up."
    put(demo, FedAvg=[60.0, 60.4, None], FedCCFA=[75.0, 75.2, 74.7, 99.0])
    half = paper_headline("demo", root=demo)
    assert (half.state, half.lacks, half.compared, half.comparisons) == (
        "cannot be tested yet",
        (Reason(Kind.LACKING, ("IFCA",), (1, 2)),),
        1,
        2,
    )
    put(demo, IFCA=[70.0, 70.4, 69.8])
    found = paper_headline("demo", root=demo)
    assert (found.ours.name, found.theirs.name, found.ours.n, found.alone, found.unit) == (
        "FedCCFA",
        "IFCA",
        3,
        False,
        "points",
    )
    assert math.isclose(found.ours.mean, 224.9 / 3)
    assert math.isclose(found.theirs.mean, 210.2 / 3)
    assert math.isclose(found.gain, 4.9)
    assert math.isclose(found.half, 4.302653 * 0.1 / 3**0.5, rel_tol=1e-6)
    assert found.state == "supported"
    assert not found.reproduced
    assert found.reasons == (Reason(Kind.DIVERGED, ("FedAvg",), (1, 3)),)
    with pytest.raises(InputError, match="'nobody'"):
        paper_headline("nobody", root=demo)


def test_the_published_gain_of_a_headline_is_over_the_same_rival():
    "Beside the smallest of its pairs, where that is over another: LfD's Table 4, 50 clients, share 0.25; FedBSS against FedExP; FedCCFA's 1.14 stands in the text and is 89.39 - 88.25"
    cells = {
        "lfd": (
            "table4",
            dict(clients=50, participation=0.25),
            "LfD",
            ["FedAvg", "FedAvgM", "FedProx", "MOON"],
        ),
        "fedbss": (
            "table1",
            dict(dataset="Fashion-MNIST", partition="dirichlet_alpha", partition_parameter=0.5),
            "FedBSS",
            ["FedExP", "FedAvg", "SCAFFOLD"],
        ),
    }
    for paper, (name, where, mine, others) in cells.items():
        csv = pd.read_csv(ROOT / f"papers/{paper}/{name}.published.csv")
        for k, v in where.items():
            if k in csv:
                csv = csv[csv[k] == v]
        means = csv.set_index("method")["mean"]
        about = paper_headline(paper)
        nearest = min(others, key=lambda o: means[mine] - means[o])
        over = about.theirs.name  # the rival that decides in our runs
        assert math.isclose(about.published, means[mine] - means[over], abs_tol=1e-9), paper
        assert over == nearest or about.printed.rival == nearest, paper
        if about.printed:
            gap = means[mine] - means[nearest]
            assert math.isclose(about.printed.gain, gap, abs_tol=1e-9), paper
    assert paper_headline("fedccfa").published == 1.14


def test_what_fedccfa_says_beside_its_lead_under_sudden_drift(tmp_path):
    """Table 9 is claimed ahead, Table 10 is not: there the paper's own numbers have FedFM ahead

    Without runs: where some rivals have runs, the published gain beside ours is the least over these."""
    first, *others = headlines(tmp_path, paper="fedccfa")
    assert first.published == 1.14
    assert {h.spec: round(h.published, 2) for h in others} == {
        "fedccfa/table1": 0.01,
        "fedccfa/table11": 0.25,
        "fedccfa/table9": 0.89,
    }
