"A job array without its queue: the jobs of `plan --sbatch`, side by side, write the files of one process"

import os
import subprocess
import sys
from pathlib import Path

from fedrepro.experiments import store
from toy import ROOT, SMALL, written


def test_two_jobs_of_an_array_share_the_runs(tmp_path, said, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    spec = written(tmp_path, SMALL)
    array = tmp_path / "an array"
    one = tmp_path / "one"
    script = tmp_path / "jobs.sh"
    asked = [spec, "--tier", "paper", "--device", "cpu"]
    code, _, err = said("plan", *asked, "--results", array, "--sbatch", script)
    assert code == 0, err
    programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    place = os.environ | {"PATH": programs, "PYTHONPATH": str(ROOT)}
    jobs = [subprocess.Popen(["bash", script], env=place, cwd=tmp_path) for _ in range(2)]
    assert [job.wait(120) for job in jobs] == [0, 0]
    assert said("run", *asked, "--results", one, "--quiet")[0] == 0

    def results(folder):
        return {p.name: store.read(p)[1] for p in folder.rglob("*.jsonl")}

    assert len(results(one)) == 4
    assert results(array) == results(one)
    assert not list(array.rglob(".*.lease"))
