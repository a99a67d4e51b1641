"A small table of a paper and its runs, for the tests of tables as values and as printed"

import pytest
import toy
from fedrepro.experiments.specs import load_spec
from toy import BASE, TOY, written

GUESS = dict(source="guess: a test")

RAW = TOY | dict(
    title="A small one",
    paper="FedCCFA",
    table="2",
    published="t.published.csv",
    spread="trials",
    trials=3,
    pairing="pooled",
    base={k: v for k, v in BASE.items() if k != "clients"}
    | dict(rounds=12, seeds=[0, 1, 2], drift="sudden", drift_round=1),
    columns=[
        GUESS | dict(clients=3, published=dict(clients=20)),
        GUESS | dict(clients=4, published=dict(clients=100)),
        GUESS | dict(clients=5, published=dict(clients=7), dataset="CINIC-10", missing="no loader"),
    ],
    methods={
        "FedAvg": {},
        "prox": {"class": "FedProx", "published": {"method": "FedProx <b>|"}},
        "twin": {"class": "FedProx"},
    },
    tiers={"smoke": {"base": dict(rounds=3, source="tier: reduced")}},
)

CSV = "method,clients,mean,std\nIFCA,20,50.0,1.0\nFedProx <b>|,20,70.0,\nFedAvg,20,70.0,0.6\nFedAvg,100,60.0,0.5\n"


@pytest.fixture
def spec(tmp_path):
    return load_spec(written(tmp_path, RAW, "demo/t", CSV))


def put(spec, tier, row, column, values):
    "Runs of `row` that end in these values, one a seed; None or a record: diverged"

    def curve(v):
        return (
            v
            if v is None or isinstance(v, dict)
            else ([v - 3, v + 1] + [v] * 10)[: spec.runs(tier)[0].rounds]
        )

    toy.put(spec, tier, row, list(map(curve, values)), column)


ONE = "digits, 3 clients"


@pytest.fixture(
    params=[
        (tier, *record)
        for tier in ("smoke", "paper")
        for record in (
            (dict(round=2, client=2, norm="1.5e+30"), "round 2, client 2, norm 1.5e+30"),
            (dict(round=12, client=None, norm="nan"), "round 12, server, norm nan"),
        )
    ]
)
def diverged(request, spec):
    "(tier, words): three runs of FedAvg at a tier, of which the last two diverged, and where the second one did"
    tier, record, words = request.param
    last = spec.runs(tier)[0].rounds
    record = record | dict(round=min(record["round"], last))
    put(spec, tier, "FedAvg", ONE, [69.0, record, None])
    return tier, words.replace("round 12", f"round {record['round']}")
