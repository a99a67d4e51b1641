"A queue of one node, where SLURM is installed: the files of a job array are those of one process"

import subprocess
from pathlib import Path

import pytest


def test_a_one_node_slurm():
    done = subprocess.run(
        ["bash", Path(__file__).parents[1].joinpath("slurm.sh")],
        capture_output=True,
        text=True,
        timeout=600,
    )
    if done.returncode == 77:
        pytest.skip(done.stdout.strip())
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines() == ["job array of 2: the same files"]
