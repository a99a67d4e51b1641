"A made-up paper with every kind of published number, for the tests of the scoreboard as values and as printed"

import pytest
import toy
from fedrepro.experiments.specs import load_spec
from toy import BASE, TOY, written

RAW = TOY | dict(
    title="A small one",
    paper="Demo",
    published="table1.published.csv",
    spread="trials",
    trials=3,
    pairing="pooled",
    base=BASE | dict(rounds=3, seeds=[0, 1], clients=3),
    columns=[
        {"label": "A", "published": {"column": "A"}},
        {"label": "B", "published": {"column": "B"}, "missing": "nobody has the data"},
    ],
    methods={
        "twin": {
            "class": "FedAvg",
            "epochs": 2,
            "source": "guess: another reading",
            "published": {"method": "FedAvg"},
        },
        "FedAvg": {},
        "IFCA": {},
    },
    tiers={
        "small": {
            "base": dict(rounds=2, source="tier: reduced"),
            "columns": [{"label": "A, small", "published": {"column": "A"}}],
        }
    },
)

CSV = (
    "paper,table,method,dataset,column,mean,std\nDemo,1,FedAvg,digits,A,70,1\nDemo,1,FedAvg,digits,B,60,1\n"
    "Demo,1,IFCA,digits,A,,\nDemo,1,Nobody,digits,A,50,1\n"
)


@pytest.fixture
def demo(tmp_path):
    path = written(tmp_path / "papers", RAW, "demo/table1", CSV)
    line = "paper,table,method,dataset,mean,std\nDemo,{},FedAvg,digits,1,\n"
    path.with_name("table9.published.csv").write_text(line.format(9))
    path.with_name("other.published.csv").write_text(line.format("third party: someone"))
    return tmp_path / "papers"


def put(demo, row, values, tier="paper"):
    "One run a seed; None = diverged. Returns the files"
    spec = load_spec("demo/table1", demo)
    return toy.put(spec, tier, row, [v and [v] * spec.runs(tier)[0].rounds for v in values])
