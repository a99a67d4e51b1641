"What lies between a job and a client's step"

import sys
from pathlib import Path

import fedrepro
from fedrepro.experiments.jobs import Job, run_job
from fedrepro.experiments.specs import load_spec
from toy import SMALL, written

PACKAGE = Path(fedrepro.__file__).parent
WATCHING = {"engine/watches.py"}  # looks at what a round was given; no number depends on it


class Entered:
    "The modules of the package that are entered in a round, and those that wait for a client's step"

    def __init__(self):
        self.in_a_round = False
        self.modules = set()
        self.waiting = []

    def module(self, frame):
        path = Path(frame.f_code.co_filename)
        return path.relative_to(PACKAGE).as_posix() if path.is_relative_to(PACKAGE) else None

    def __call__(self, frame, event, arg):
        module = self.module(frame)
        name = frame.f_code.co_name
        if module is None or event not in ("call", "return"):
            return
        if (module, name) == ("engine/rounds.py", "next_round"):
            self.in_a_round = event == "call"
        if self.in_a_round:
            self.modules.add(module)
        if (module, name) == ("engine/client.py", "sgd_step") and not self.waiting:
            while frame is not None:
                self.waiting.append(self.module(frame))
                frame = frame.f_back


def test_from_a_job_to_a_step_it_is_at_most_thirteen_modules(tmp_path):
    "Without what describes and builds the run before its rounds, what keeps it after them, and what watches them"
    spec = load_spec(written(tmp_path, SMALL, "toy/x"))
    (run,) = spec.runs(next(iter(spec.tiers)), methods=["FedAvg"], seeds=1)
    entered = Entered()
    sys.setprofile(entered)
    try:
        run_job(Job([run], tmp_path / "results"))
    finally:
        sys.setprofile(None)
    path = [module for module in entered.waiting if module][::-1]
    assert list(dict.fromkeys(path)) == [
        "experiments/jobs.py",
        "engine/forks.py",
        "engine/rounds.py",
        "engine/client.py",
    ]
    modules = entered.modules | set(path)
    assert len(modules - WATCHING) <= 13, sorted(modules)
