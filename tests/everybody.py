"A small sweep in which every method has a run, as a script that tests start, kill and start again"

import sys
from dataclasses import replace
from pathlib import Path

from fedrepro.engine.checkpoints import CheckpointWriter
from fedrepro.engine.method import load_methods
from fedrepro.experiments import runner
from fedrepro.experiments.runs import PlannedRun, method_settings
from fedrepro.experiments.specs import load_spec

ROOT = Path(__file__).resolve().parents[1]
LOCAL = dict(lr=0.05, epochs=1, batch_size=128)


def every_run(rounds: int = 4, names=None) -> list[PlannedRun]:
    "A run of each method on digits: five clients, three a round, sudden drift before the third; FedAvg and FedCCFA without drift too"
    base = load_spec("fedccfa/table2", ROOT / "papers").runs("smoke", methods=["FedAvg"], seeds=1)[
        0
    ]
    runs = []
    for name, cls in load_methods().items():
        if not cls.__module__.startswith("fedrepro.") or (names and name not in names):
            continue
        method = cls(**LOCAL | cls.check_settings)
        settings = base.settings | dict(
            method={"class": name, "version": cls.version, "fields": method_settings(method)},
            rounds=rounds,
            participation=0.6,
            partition=base.settings["partition"] | dict(clients=5),
            drift={"name": "sudden", "at": 2},
        )
        if name == "Union":
            settings |= dict(drift={"name": "none"}, participation=1.0)
        runs.append(replace(base, row=name, settings=settings))
        if name in ("FedAvg", "FedCCFA"):
            runs.append(replace(base, row=name, settings=settings | dict(drift={"name": "none"})))
    return runs


if __name__ in ("__main__", "__mp_main__"):  # here and in worker processes
    # the last checkpoints stay, so that parameters and states can be compared
    CheckpointWriter.clear = lambda self, finished=None: None
    runner.forget_finished = lambda folder, finished: None

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    workers = int(sys.argv[2])
    names = sys.argv[3:]
    report = runner.compute_runs(
        every_run(names=names),
        folder,
        workers=workers,
        quiet=True,
        executor="sequential",
        checkpoint_rounds=1,
    )
    sys.exit(report.exit_code)
