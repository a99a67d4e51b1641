"Files of one's own: executed before any name is looked up, whatever they raise, and files that are no files"
import os
import sys
from unittest.mock import patch

import pytest

from fedrepro.data.datasets import MADE
from fedrepro.data.transforms import PIXEL_STATISTICS
from fedrepro.models.architectures import ARCHITECTURES
from toy import SMALL, written

DATA = """import torch
from fedrepro.data import datasets, transforms
from fedrepro.models.architectures import Network, architecture
def parts():
    x, y = torch.arange(120 * 36, dtype=torch.uint8).reshape(120, 1, 6, 6), torch.arange(120) % 3
    return dict(train_x=x, train_y=y, test_x=x[:30], test_y=y[:30], class_names=("a", "b", "c"))
datasets.MADE["stripes"] = parts
transforms.PIXEL_STATISTICS["stripes"] = ((.5,), (.3,))
@architecture(1, 6, 6)
def stripes_net(classes, shape):
    return Network(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(36, 4)), torch.nn.Linear(4, classes))
"""

@pytest.fixture
def own(tmp_path, monkeypatch):
    "Writes a file of one's own under a module name that no other test has; what it registers is forgotten"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDREPRO_METHODS", "")
    before = set(sys.modules)
    def write(text, name=""):
        path = tmp_path / f"{name}{tmp_path.name}.py".replace("-", "_")
        path.write_text(text)
        return path
    with patch.dict(MADE), patch.dict(PIXEL_STATISTICS), patch.dict(ARCHITECTURES): yield write
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)): del sys.modules[name]

def test_every_command_knows_what_an_imported_file_brings(said, own, tmp_path):
    "Pays for two comparisons of two rounds"
    file = own(DATA)
    stripes = SMALL | dict(base=SMALL["base"] | dict(dataset="stripes", network="stripes_net"))
    spec = written(tmp_path / "papers", stripes, "demo/t")
    little = "--clients 3 --rounds 1 --seeds 1 --quiet".split()
    for command in (["datasets"], ["data", "stripes"], ["plan", spec, "--tier", "smoke", "--device", "cpu"], ["table", spec],
                    ["compare", "FedAvg", "--dataset", "stripes", *little],
                    ["compare", "FedAvg", "--dataset", "stripes", "--network", "stripes_net", *little]):
        os.environ["FEDREPRO_METHODS"] = ""
        code, out, err = said(*command, "--import", file.name)
        assert (code, err) == (0, ""), (command, err)
        assert command[0] != "datasets" or "stripes" in out
