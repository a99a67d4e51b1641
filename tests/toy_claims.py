"A claim of a made-up paper, and runs that it rests on, for the tests of claims as values and as printed"

import pytest
import toy
from fedrepro.experiments.specs import load_spec
from fedrepro.verdicts.claims import verdicts
from toy import BASE, TOY, written

RAW = TOY | dict(
    title="A small one",
    paper="Demo",
    published="t.published.csv",
    base=BASE | dict(rounds=6, seeds=[0, 1, 2], clients=3),
    columns=[{"label": c, "published": {"column": c}} for c in "AB"],
    methods={"FedCCFA": {}, "FedAvg": {}, "IFCA": {}, "extra": {"class": "FedProx"}},
    tiers={"small": {"base": dict(rounds=4, source="tier: reduced")}},
)

CSV = "method,column,mean,std\n" + "".join(
    f"{m},{c},70,1\n" for m in ("FedCCFA", "FedAvg", "IFCA") for c in "AB"
)
CSV += "extra,A,,\n"  # a dash in the paper: nobody's rival

ONE = """
[[claim]]
paper = "Demo"
source = "text 1"
says = "best of all"
kind = "gain over all others"
spec = "demo/t"
rows = ["FedCCFA"]
columns = ["A"]
"""


def claim(**changes):
    "ONE with other lines"
    kept = [line for line in ONE.splitlines(True) if line.partition(" = ")[0] not in changes]
    return "".join([*kept, *(f"{k} = {v}\n" for k, v in changes.items())])


@pytest.fixture
def demo(tmp_path):
    "A papers/ folder with one spec of three published rows, one extra row, two columns"
    folder = tmp_path / "papers"
    written(folder, RAW, "demo/t", CSV).with_name("claims.toml").write_text(ONE)
    return folder


def put(demo, column="A", tier="paper", curve=None, **rows):
    "One run a seed of each of `rows`, which ends in its value; None = diverged"
    spec = load_spec("demo/t", demo)
    for row, values in rows.items():
        curves = [
            v and (curve or [v - 10, v - 1, v, v, v, v])[-spec.runs(tier)[0].rounds :]
            for v in values
        ]
        toy.put(spec, tier, row, curves, column)


def only(demo, tier="paper"):
    return verdicts(tier, root=demo).iloc[0]
