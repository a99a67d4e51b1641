"What computes is what is named: the source of a person's code, the state of PyTorch, the data, and answers from a cache"

import json
import os
import subprocess
import sys
from functools import partial

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

from fedrepro.core import errors, own_modules
from fedrepro.core.errors import InputError
from fedrepro.core.own_files import adopt, as_imported, import_file, own_texts
from fedrepro.core.fingerprints import own_digest
from fedrepro.core.torch_state import USUAL, positions, put
from fedrepro.data import datasets, partition, transforms
from fedrepro.engine import federation, method
from fedrepro.engine.method import FedAvg, load_methods
from fedrepro.engine.rows import METRICS
from fedrepro.experiments import runner, runs, store
from fedrepro.experiments.specs import load_spec
from fedrepro.models.architectures import ARCHITECTURES
from fedrepro.reporting.printed_tables import render
from toy import ROOT, SMALL, one_line, written


@pytest.fixture
def files(tmp_path, monkeypatch):
    "Writes files into a folder of its own and imports the last one; what they register is forgotten after the test"
    tables = [
        dict(t)
        for t in (
            method.METHODS,
            ARCHITECTURES,
            datasets.DATA_CARDS,
        )
    ]
    known = set(sys.modules)

    def files(**texts):
        for name, text in texts.items():
            path = tmp_path / f"{name.replace('__', '/')}.py"
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        monkeypatch.setenv("FEDREPRO_METHODS", str(path))
        load_methods()
        return path

    yield files
    for name in set(sys.modules) - known:
        if own_modules.own_file(getattr(sys.modules[name], "__file__", None)):
            del sys.modules[name]
    mine = own_modules.OWN_MODULES
    for registry in (mine.source_overrides, mine.root_folders, mine.imported, mine.runtime_imports):
        registry.clear()
    mine.search_path.clear()
    for table, before in zip(
        (
            method.METHODS,
            ARCHITECTURES,
            datasets.DATA_CARDS,
        ),
        tables,
    ):
        table.clear()
        table.update(before)


OWN = "from fedrepro import FedAvg\n{}\nclass Idem(FedAvg):\n    def aggregate(self, server, exchange): return {}\n"


def planned(tmp_path, name="toy/x", base=None, **more):
    raw = SMALL | dict(tiers={"smoke": {"base": {"rounds": 2, "source": "tier: reduced"}}}) | more
    return load_spec(written(tmp_path, raw | {"base": raw["base"] | (base or {})}, name)).runs(
        "smoke", seeds=1
    )


def source(run):
    return run.settings["method"].get("source")


# --- what a digest consists of


def test_a_helper_module_belongs_to_a_method_and_a_strange_one_does_not(files, tmp_path):
    "Idem imports a helper, which imports another inside a function; a file beside them is of no matter"

    def ids(deep="1", other="1"):
        files(
            deep_x=f"W = {deep}\n",
            other_x=f"W = {other}\n",
            help_x="def w():\n    import deep_x\n    return deep_x.W\n",
            idem_x=OWN.format("import help_x", "super().aggregate(server, exchange)"),
        )
        return source(planned(tmp_path, methods={"Idem": {}})[0])

    assert ids() == ids(other="2") != ids(deep="2")
    assert ids() == ids()


def test_an_edited_file_is_imported_again_under_a_new_name_and_a_planned_run_is_refused(
    files, tmp_path
):
    "In one process, of one size and within a second: neither the old code under the new id, nor the reverse"

    def write(value):
        return files(idem_y=OWN.format(f"VALUE = {value}", "server"))

    write(1)
    (old,) = planned(tmp_path, methods={"Idem": {}})
    path = tmp_path / "idem_y.py"
    path.write_text(path.read_text().replace("VALUE = 1", "VALUE = 2"))
    with as_imported():
        load_methods()
        assert sys.modules["idem_y"].VALUE == 1
        runs.check_sources(old)
    (new,) = planned(tmp_path, methods={"Idem": {}})
    assert sys.modules["idem_y"].VALUE == 2
    assert source(old) != source(new)
    runs.check_sources(new)
    with one_line(
        "the source of its Idem is not the one that it was planned with", source(old), source(new)
    ):
        runs.check_sources(old)


def test_a_module_that_is_imported_by_a_computed_name_belongs_to_it(files, tmp_path):
    head = "import importlib\nHELP = importlib.import_module('comp_' + 'helper')\n"

    def ids(factor):
        files(comp_helper=f"W = {factor}\n", idem_c=head + OWN.format("", "server"))
        return source(planned(tmp_path, methods={"Idem": {}})[0])

    assert ids(1) != ids(2)
    assert ids(1) == ids(1)
    with as_imported():
        sent = own_texts()
        before = own_digest(method.METHODS["Idem"])
        for name in ("idem_c", "comp_helper"):
            del sys.modules[name]
        own_modules.OWN_MODULES.runtime_imports.clear()
        adopt(sent)
        load_methods()
        assert own_digest(method.METHODS["Idem"]) == before


@pytest.mark.parametrize("hook", ["init_server", "loss"])
def test_a_computed_name_while_runs_are_computed_fails_that_run(files, tmp_path, hook):
    "What is found out only then cannot be in the name; one that is written out belongs to it, wherever it stands"
    text = (
        "import importlib\nfrom fedrepro import FedAvg\nclass Late(FedAvg):\n"
        f"    def {hook}(self, *a):\n        {{}}\n        return super().{hook}(*a)\n"
    )
    files(late_helper="W = 1\n", late_x=text.format("importlib.import_module('late_' + 'helper')"))
    late, avg = planned(tmp_path, methods={"Late": {}, "FedAvg": {}})
    report = runner.compute_runs([late, avg], tmp_path / "r", quiet=True)
    assert [*report.failed] == [late]
    assert len(report.done) == 1
    assert "late_x imports late_helper by a computed name" in report.failed[late]
    assert "(late_x.py:5)" in report.failed[late]
    assert "late_helper" not in sys.modules
    files(late_x=text.format("import late_helper"))
    (late, _) = planned(tmp_path, methods={"Late": {}, "FedAvg": {}})
    assert runner.compute_runs([late], tmp_path / "r", quiet=True).exit_code == 0


def test_a_constant_that_was_changed_after_the_import_is_in_the_name(files, tmp_path):
    "Set back, the old name is right again; other values of a module may change as they like"
    files(idem_k="CACHE = {}\nCALLS = 0\nRATE = 0.5\nrate = 1\n" + OWN.format("", "server"))
    (first,) = planned(tmp_path, methods={"Idem": {}})
    module = sys.modules["idem_k"]
    module.CACHE[1], module.rate = 2, 3
    runs.check_sources(first)
    module.RATE = 0.25
    with one_line("the source of its Idem", "a constant of it changed"):
        runs.check_sources(first)
    (second,) = planned(tmp_path, methods={"Idem": {}})
    assert source(second) != source(first)
    runs.check_sources(second)
    module.RATE = 0.5
    runs.check_sources(first)


READ = """import json, os, time
from pathlib import Path
from types import SimpleNamespace
import numpy as np
import torch
from fedrepro import FedAvg
{}
class Idem(FedAvg):
    def aggregate(self, server, exchange): return super().aggregate(server, exchange)
"""
FILE = "(Path(__file__).parent / 'conf.json').read_text()"


@pytest.mark.parametrize(
    "line",
    [
        f"conf = json.loads({FILE})",
        f"MU = float(json.loads({FILE})['mu'])",
        f"rates = [(json.loads({FILE})['mu'], 'x')]",
        f"kinds = {{json.loads({FILE})['mu'], 'x'}}",
        f"table = dict(deep=dict(loss=print, mu=json.loads({FILE})['mu']))",
        f"conf = SimpleNamespace(**json.loads({FILE}))",
        f"weights = np.full(3, json.loads({FILE})['mu'])",
        f"weights = torch.full((3,), json.loads({FILE})['mu'], dtype=torch.bfloat16)",
        f"class Conf:\n    mu = json.loads({FILE})['mu']",
        f"def penalty(x, mu=json.loads({FILE})['mu']): return mu * x",
        "HERE = os.getcwd()\nconf = json.loads(Path(HERE, 'conf.json').read_text())",
        "scale = float(os.environ['SCALE'])",
        "from read_help import conf",
        "import read_help",
    ],
)
def test_what_a_file_has_read_at_its_top_is_in_the_name(files, tmp_path, monkeypatch, line):
    "Another content is another run, the old content is the old run, and a run that is planned meanwhile is refused"
    monkeypatch.chdir(tmp_path)

    def run(mu):
        (tmp_path / "conf.json").write_text(json.dumps(dict(mu=mu)))
        monkeypatch.setenv("SCALE", str(mu))
        for name in ("read_x", "read_help"):
            sys.modules.pop(name, None)
            own_modules.OWN_MODULES.imported.clear()
        files(
            read_help=f"import json\nfrom pathlib import Path\nconf = json.loads({FILE})\n",
            read_x=READ.format(line),
        )
        return planned(tmp_path, methods={"Idem": {}})[0]

    first = run(0.5)
    second = run(5.0)
    assert first.run_id != second.run_id
    with one_line("the source of its Idem is not the one that it was planned with"):
        runs.check_sources(first)
    assert run(0.5).run_id == first.run_id
    runs.check_sources(first)


def test_a_file_that_did_not_change_has_one_name_in_every_process_and_folder(tmp_path):
    "Clocks, temporary folders, addresses, the order of sets, and where the file lies say nothing of its numbers"
    top = (
        "import tempfile\nSTART = time.time()\nstamp = f'run {START}'\nWORK = tempfile.mkdtemp()\n"
        "HERE = Path(__file__).parent\nNAMES = {'a', 'b', 'c'}\nTABLE = {'f': print, 'g': object(), 'h': HERE}\n"
        "loop = []\nloop.append(loop)\nweights = torch.arange(4.)\n"
    )
    digests = set()
    for folder in "ab":
        files_in(tmp_path / folder, read_y=READ.format(top))
        code = (
            f"import os\nos.environ['FEDREPRO_METHODS'] = {str(tmp_path / folder / 'read_y.py')!r}\n"
            "from fedrepro.engine.method import load_methods\nfrom fedrepro.core.fingerprints import own_digest\n"
            "print(own_digest(load_methods()['Idem']))"
        )
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
        )
        digests.add(done.stdout)
    assert len(digests) == 1


def test_what_a_function_imports_later_does_not_turn_the_name_of_a_run(files, tmp_path):
    text = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import late_values\n" + OWN
    files(
        late_values="W = 1\n",
        idem_l=text.format("def later():\n    import late_values\n", "server"),
    )
    (run,) = planned(tmp_path, methods={"Idem": {}})
    sys.modules["idem_l"].later()
    assert sys.modules["late_values"].W == 1
    runs.check_sources(run)


@pytest.mark.parametrize("name", ["FedAvg", "FedProx"])
def test_a_method_of_a_file_with_the_name_of_one_of_the_package(files, tmp_path, name):
    "It is refused where the name is asked for, an own FedAvg too; other rows stay the package's"
    other = "FedProx" if name == "FedAvg" else "FedAvg"
    text = "from fedrepro.methods import objective\nfrom fedrepro.engine import method\n" + (
        "class {}(getattr(objective, {!r}, method.FedAvg)):\n    def aggregate(self, server, exchange): return server\n"
    )
    files(clash_x=text.format(name, name))
    with one_line(f"{name} of clash_x has the name of a method of the package; rename it"):
        planned(tmp_path, methods={name: {}})
    assert source(planned(tmp_path, methods={other: {}})[0]) is None
    files(clash_x=text.format("Renamed", name))
    assert source(planned(tmp_path, methods={name: {}})[0]) is None
    assert source(planned(tmp_path, methods={"Renamed": {}})[0])


TWICE = {
    "method": "from fedrepro import FedAvg\nclass Same(FedAvg): pass\n",
    "network": "from fedrepro import architecture\n@architecture(1, 8, 8)\ndef Same(classes, shape): return {}\n",
    "data set": "from fedrepro.data import datasets\ndatasets.add_data_set('Same', dict)\n",
    "partition recipe": (
        "from fedrepro.data.partition import partition_recipe\n@partition_recipe('Same')\n"
        "def mine(per_class, clients, rng): return {}\n"
    ),
    "metric": (
        "from fedrepro.engine.rows import Metric, add_metric\n"
        "add_metric(Metric('Same', compute=lambda p, y, l, s: 1.0))\n"
    ),
}


@pytest.mark.parametrize("what", TWICE)
def test_two_files_that_define_one_name(files, tmp_path, monkeypatch, what):
    "Where both are named, both are in the line. The same file may be imported again, and another in its place"
    tables = dict(partition.PARTITIONS), dict(METRICS)
    try:
        first = files(same_a=TWICE[what])
        files(same_a=TWICE[what] + "# edited\n")
        second = first.with_name("same_b.py")
        second.write_text(TWICE[what])
        monkeypatch.setenv("FEDREPRO_METHODS", os.pathsep.join(map(str, (first, second))))
        with one_line(f"{what} Same is defined in {first} and in", "same_b.py; rename one"):
            load_methods()
            planned(tmp_path, methods={"Same": {}})
        files(same_b=TWICE[what])
        if what == "method":
            assert source(planned(tmp_path, methods={"Same": {}})[0])
    finally:
        for table, before in zip((partition.PARTITIONS, METRICS), tables):
            table.clear()
            table.update(before)


def test_what_the_package_defines_while_a_file_imports_it_is_not_the_files(tmp_path):
    "The file that loads the package first does not own its networks and recipes"
    (tmp_path / "first.py").write_text(
        "import fedrepro.models.networks, fedrepro.data.datasets, fedrepro.engine.rows\n"
        "from fedrepro.core.own_modules import OWN_MODULES\nprint(sum(OWN_MODULES.definitions.values(), []))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", "import first"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.stdout.strip() == "[]", done.stderr


def test_a_class_that_moves_to_another_file_of_its_family(files, tmp_path):
    files(moved_b="", moved_a="import moved_b\n" + TWICE["method"])
    files(moved_b=TWICE["method"], moved_a="from moved_b import Same\n")
    assert source(planned(tmp_path, methods={"Same": {}})[0])


def test_an_edit_that_cannot_be_imported_leaves_what_was(files, tmp_path):
    path = files(idem_z=OWN.format("", "server"))
    before = method.METHODS["Idem"]
    path.write_text("1 / 0\n")
    with one_line("idem_z.py: ZeroDivisionError"):
        load_methods()
    assert method.METHODS["Idem"] is before
    assert sys.modules["idem_z"].Idem is before


def test_a_package_with_relative_imports(files, tmp_path):
    (tmp_path / "mylab").mkdir()
    (tmp_path / "mylab/__init__.py").write_text("")
    files(mylab__tools="RATE = 2\n", mylab__deep=OWN.format("from .tools import RATE", "server"))
    first = own_digest(method.METHODS["Idem"])
    assert method.METHODS["Idem"].__module__ == "mylab.deep"
    (tmp_path / "mylab/tools.py").write_text("RATE = 3\n")
    load_methods()
    assert sys.modules["mylab.deep"].RATE == 3
    assert own_digest(method.METHODS["Idem"]) != first


def test_two_files_of_one_name(files, tmp_path):
    files(help_w="A = 1\n", one_w="import help_w\n")
    for text, words in (("A = 2\n", ("help_w", "rename")), (None, ())):
        if text:
            files_in(tmp_path / "b", help_w=text, two_w="import help_w\n")
        else:
            break
        with one_line("two_w.py", *words):
            import_file(tmp_path / "b/two_w.py")
    files_in(tmp_path / "b", one_w="")
    with one_line("a module is called 'one_w' already; rename the file"):
        import_file(tmp_path / "b/one_w.py")


def files_in(folder, **texts):
    folder.mkdir(exist_ok=True)
    for name, text in texts.items():
        (folder / f"{name}.py").write_text(text)


def typed(text, **names):
    "What a notebook's cell defines as `f`"
    space = {
        "__name__": "__main__",
        "nn": nn,
        "FedAvg": FedAvg,
        "partial": partial,
        "np": np,
    } | names
    exec(text, space)
    return space["f"]


def test_a_helper_with_the_name_of_a_module_of_pythons_is_refused(tmp_path):
    "Python's own `statistics` would be imported in place of the file beside the method"
    (tmp_path / "statistics.py").write_text("SCALE = 42\n")
    path = tmp_path / "helped_w.py"
    path.write_text("import statistics\n" + OWN.format("", "").replace("Idem", "Helped"))
    with one_line("helped_w.py: imports statistics", "not statistics.py beside it; rename"):
        import_file(path)


@pytest.mark.parametrize(
    "one, other",
    [
        ("def f(x): return x + 1", "def f(x): return x + 2"),
        ("K = 1\ndef f(x): return x + K", "K = 2\ndef f(x): return x + K"),
        ("f = lambda x: x * 2", "f = lambda x: x * 3"),
        ("def f(x, k=1): return k", "def f(x, k=2): return k"),
        ("def g(x): return 1\ndef f(x): return g(x)", "def g(x): return 2\ndef f(x): return g(x)"),
        (
            "def make(k):\n    def f(): return k\n    return f\nf = make(1)",
            "def make(k):\n    def f(): return k\n    return f\nf = make(2)",
        ),
        ("f = partial(nn.Linear, 3)", "f = partial(nn.Linear, 4)"),
        ("A = np.arange(3)\ndef f(): return A", "A = np.arange(4)\ndef f(): return A"),
        (
            "class f(FedAvg):\n    k = 1\n    def loss(self, *given): return self.k",
            "class f(FedAvg):\n    k = 2\n    def loss(self, *given): return self.k",
        ),
        (
            "class f(FedAvg):\n    def loss(self, *given): return [lambda: 1]",
            "class f(FedAvg):\n    def loss(self, *given): return [lambda: 2]",
        ),
    ],
)
def test_what_is_typed_into_a_notebook(one, other):
    first = typed(one)
    second = typed(other)
    assert (
        own_digest(first, True)
        == own_digest(typed(one + "  # a comment"), True)
        != own_digest(second, True)
    )
    assert own_digest(load_methods()["SCAFFOLD"]) == ""


def test_a_digest_is_the_same_in_every_process(files, tmp_path):
    path = files(
        idem_p=OWN.format("from fedrepro import architecture\nNAMES = {'a', 'b', 'c'}", "server")
    )
    code = (
        f"import os\nos.environ['FEDREPRO_METHODS'] = {str(path)!r}\nfrom fedrepro.engine.method import load_methods\n"
        "from fedrepro.core.fingerprints import own_digest\nprint(own_digest(load_methods()['Idem']))"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert out.strip() == own_digest(method.METHODS["Idem"])


def test_code_travels_as_it_was_imported(files, tmp_path):
    "A worker that has another version imports the sender's, whatever the files say"
    path = files(help_t="W = 1\n", idem_t=OWN.format("from help_t import W", "server"))
    then = own_digest(method.METHODS["Idem"])
    sent = own_texts()
    files(help_t="W = 2\n", idem_t=OWN.format("from help_t import W", "server"))
    assert own_digest(method.METHODS["Idem"]) != then
    with as_imported():
        adopt(sent)
        load_methods()
        assert sys.modules["idem_t"].W == 1
        assert own_digest(method.METHODS["Idem"]) == then
    path.unlink()


# --- networks, data sets, partitions

NET = """from torch import nn
from fedrepro import Network, architecture
@architecture(1, 8, 8)
def {}(classes, shape): return Network(nn.Sequential(nn.Flatten(), nn.Linear(64, {})), nn.Linear({}, classes))
"""


def test_the_source_of_a_network_is_in_the_name(files, tmp_path):
    def run(width):
        files(net_x=NET.format("mynet", width, width))
        return planned(tmp_path, base=dict(network="mynet"))[0]

    first = run(8)
    second = run(9)
    assert first.run_id != second.run_id
    assert set(first.settings["sources"]) == {"network"}
    assert run(8).run_id == first.run_id
    head = dict(settings=first.settings, run_id=first.run_id, status="diverged")
    assert store.decode(store.encode(head, []))[0]["settings"] == first.settings
    assert "sources" not in planned(tmp_path)[0].settings


@pytest.mark.parametrize(
    "text, words",
    [
        (NET.format("digits_cnn", 8, 8), "digits_cnn is a network of the package"),
        (
            "from fedrepro.data import datasets\ndatasets.DATA_CARDS['digits'] = datasets.DataCard('digits', dict)\n",
            "digits is a data set of the package",
        ),
        (
            "from fedrepro.data import datasets\ndatasets.RECIPES['FedCCFA']['digits'] = dict(flip=True)\n",
            "FedCCFA is a recipe of the package",
        ),
        (
            "from fedrepro.data.partition import partition_recipe\n@partition_recipe('iid')\ndef mine(per_class, clients, rng): return 0\n",
            "iid is a partition recipe of the package",
        ),
        ("from fedrepro import FedAvg\nFedAvg.loss = print\n", "it replaces loss of FedAvg"),
        (
            "from fedrepro.engine import client\nclient.cross_entropy = print\n",
            "it replaces cross_entropy of fedrepro.engine.client",
        ),
        (
            "import torch\ntorch.set_default_dtype(torch.float64)\n",
            "torch's default dtype to torch.float64",
        ),
        ("import torch\ntorch.set_grad_enabled(False)\n", "torch's grad mode to False"),
        ("import torch\ntorch.use_deterministic_algorithms(True)\n", "torch's deterministic mode"),
    ],
)
def test_what_a_file_may_not_change(files, tmp_path, text, words):
    before = (FedAvg.loss, ARCHITECTURES["digits_cnn"], json.dumps(datasets.RECIPES))
    state = positions()
    with one_line("bad_x.py", words):
        files(bad_x=text)
    assert before == (FedAvg.loss, ARCHITECTURES["digits_cnn"], json.dumps(datasets.RECIPES))
    assert positions() == state
    files(good_x="import torch\ntorch.set_num_threads(3)\n")
    assert torch.get_num_threads() == state["number of threads"]


MADE = """import torch
from fedrepro.data import datasets
def bars():
    g = torch.Generator().manual_seed({})
    x, y = torch.randint(256, (60, 1, 8, 8), generator=g, dtype=torch.uint8), torch.arange(60) % 4
    return dict(train_x=x[:40], train_y=y[:40], test_x=x[40:], test_y=y[40:], class_names=tuple("abcd"))
datasets.add_data_set("bars", bars, *{})
"""


def test_the_reader_and_the_normalisation_of_a_data_set_are_in_the_name(files, tmp_path):
    def run(seed, statistics):
        files(bars_x=MADE.format(seed, statistics))
        return planned(tmp_path, base=dict(dataset="bars"))[0]

    found = {
        run(*how).settings["sources"]["data"]
        for how in ((0, "((.5,), (.2,))"), (1, "((.5,), (.2,))"), (0, "((.4,), (.2,))"))
    }
    assert len(found) == 3


def test_other_data_than_those_of_a_stored_run_are_refused(files, tmp_path):
    "A reader that reads what nothing checks: the file is another one at the second command, and between two rows of a table"
    files(
        read_x=MADE.format("int(open('" + str(tmp_path / "number") + "').read())", "((.5,), (.2,))")
    )
    (tmp_path / "number").write_text("1")
    raw = dict(base=dict(dataset="bars", network="feddc_linear", batch_size=16))
    both = planned(tmp_path, **raw)
    assert runner.compute_runs(both[:1], tmp_path / "r", quiet=True).exit_code == 0
    assert (
        runner.compute_runs(both[:1], tmp_path / "r", quiet=True).summary()
        == "0 computed, 1 were there"
    )
    (tmp_path / "number").write_text("2")
    with one_line("was computed on other data bars"):
        runner.compute_runs(both, tmp_path / "r", quiet=True)
    assert runner.compute_runs(both[1:], tmp_path / "r", quiet=True).exit_code == 0
    with one_line("were computed on different data (bars)"):
        render(load_spec(tmp_path / "toy/x.toml"), "smoke", results=tmp_path / "r")


DRAWS = """import random
import numpy as np, torch
from fedrepro.data import datasets
def stars():
    x = torch.randint(256, (60, 1, 8, 8), dtype=torch.uint8)
    x[0, 0, 0, 0], x[0, 0, 0, 1] = np.random.randint(256), random.randrange(256)
    y = torch.arange(60) % 4
    return dict(train_x=x[:40], train_y=y[:40], test_x=x[40:], test_y=y[40:], class_names=tuple("abcd"))
datasets.add_data_set("stars", stars)
"""


def test_what_a_reader_draws_is_the_same_for_everybody(files):
    "Whatever was drawn before; and nothing that is drawn after it is another"
    files(stars_x=DRAWS)
    torch.manual_seed(1)
    one = datasets.load("stars").fingerprint
    after = torch.rand(())
    other = datasets.load("stars").fingerprint
    torch.manual_seed(1)
    assert one == other
    assert after == torch.rand(())


LEARNED = (
    NET.format("learned_net", 8, 8).replace("return Network(", "return told(", 1)
    + """
import torch
def told(body, head):
    body.load_state_dict(torch.load({!r}, weights_only=True))
    return Network(body.requires_grad_(False), head)
"""
)


def test_other_weights_than_those_of_a_stored_run_are_refused(files, tmp_path):
    "Weights that were learned elsewhere: the file is another one at the second command, and between two rows of a table"
    kept = tmp_path / "weights.pt"

    def learn(value):
        torch.save({"1.weight": torch.full((8, 64), value), "1.bias": torch.zeros(8)}, kept)

    files(learned_x=LEARNED.replace("{!r}", repr(str(kept))))
    learn(0.1)
    both = planned(tmp_path, base=dict(network="learned_net"))
    assert runner.compute_runs(both[:1], tmp_path / "r", quiet=True).exit_code == 0
    again = runner.compute_runs(both[:1], tmp_path / "r", quiet=True)
    assert again.summary() == "0 computed, 1 were there"
    learn(0.2)
    with one_line("network learned_net started from other weights than it has now"):
        runner.compute_runs(both, tmp_path / "r", quiet=True)
    assert runner.compute_runs(both[1:], tmp_path / "r", quiet=True).exit_code == 0
    with one_line("started from different weights of learned_net"):
        render(load_spec(tmp_path / "toy/x.toml"), "smoke", results=tmp_path / "r")


# --- the state of PyTorch


def test_a_kernel_in_another_state_computes_the_same(tmp_path):
    (run,) = planned(tmp_path, methods={"FedAvg": {}})
    runner.compute_runs([run], tmp_path / "a", quiet=True)
    here = positions()
    put(
        USUAL
        | {
            "default dtype": torch.float64,
            "grad mode": False,
            "number of threads": 2,
            "flushing of denormals": True,
        }
    )
    try:
        now = positions()
        runner.compute_runs([run], tmp_path / "b", quiet=True)
        assert positions() == now
    finally:
        put(here)
    a, b = (store.read(store.run_path(tmp_path / place, run))[1] for place in "ab")
    assert a == b


TURNS = """import torch
from fedrepro import FedAvg
class Turns(FedAvg):
    def client_result(self, client, params, results):
        if client.round == {}:
            torch.set_default_dtype(torch.float64)
        return super().client_result(client, params, results)
"""


@pytest.mark.parametrize("how", ["sequential", "processes"])
def test_a_method_that_turns_a_switch_has_no_result_and_changes_no_other(files, tmp_path, how):
    "In a later round than the first, which is tried. Pays for worker processes once"
    files(turn_x=TURNS.format(1))
    turns, avg = planned(tmp_path, methods={"Turns": {}, "FedAvg": {}})
    report = runner.compute_runs(
        [turns, avg], tmp_path / "r", quiet=True, executor=how, workers=1 + (how == "processes")
    )
    assert "Turns sets torch's default dtype to torch.float64" in report.failed[turns]
    assert [*report.failed] == [turns]
    runner.compute_runs([avg], tmp_path / "alone", quiet=True)
    assert (
        store.read(store.run_path(tmp_path / "r", avg))[1]
        == store.read(store.run_path(tmp_path / "alone", avg))[1]
    )
    assert torch.get_default_dtype() == torch.float32


def test_a_switch_that_is_turned_in_the_first_round_is_refused_before_it(files, tmp_path):
    files(turn_x=TURNS.format(0))
    runs = planned(tmp_path, methods={"Turns": {}, "FedAvg": {}})
    with pytest.raises(InputError, match="Turns sets torch's default dtype to torch.float64"):
        runner.compute_runs(runs, tmp_path / "r", quiet=True)
    assert torch.get_default_dtype() == torch.float32
    assert not list(tmp_path.rglob("*.jsonl"))


# --- cached answers


def test_an_answer_follows_links_and_what_was_read(tmp_path):
    from fedrepro.cli.app import state_of

    (tmp_path / "disk/smoke").mkdir(parents=True)
    (tmp_path / "here").mkdir()
    (tmp_path / "here/smoke").symlink_to(tmp_path / "disk/smoke")
    (tmp_path / "here/loop").symlink_to(tmp_path / "here")

    def state():
        for f in tmp_path.rglob("*.jsonl"):
            os.utime(f, (1e9, 1e9))
        return state_of([tmp_path / "here"])

    before = state()
    (tmp_path / "disk/smoke/a.jsonl").write_text("1")
    after = state()
    (tmp_path / "disk/smoke/a.jsonl").write_text("2")  # of the same size, and given the same time
    assert before != after != state()


def test_a_spec_of_the_same_name_and_content_in_another_folder_is_another(tmp_path, monkeypatch):
    folders = []
    for name in "ab":
        written(tmp_path, SMALL, f"{name}/x")
        monkeypatch.chdir(tmp_path / name)
        folders.append(load_spec("x.toml").folder)
    assert folders == ["a", "b"]


@pytest.mark.parametrize("before", [True, False], ids=["before the package's", "after"])
def test_a_class_of_a_script_with_the_name_of_a_method_is_refused(before, tmp_path):
    "Whether it is defined before the package's methods are loaded or after: never is one run in place of the other"
    load = "from fedrepro.engine.method import load_methods\nload_methods()\n"
    own = "class LfD(FedAvg):\n    def loss(self, client, params, batch): return 0 * super().loss(client, params, batch)\n"
    plan = (
        "from fedrepro.experiments.specs import load_spec\nload_spec('lfd/table2').runs('smoke')\n"
    )
    (tmp_path / "mine.py").write_text(
        "from fedrepro import FedAvg\n" + (own + load if before else load + own) + plan
    )
    done = subprocess.run([sys.executable, tmp_path / "mine.py"], capture_output=True, text=True)
    assert done.returncode == 1
    assert "LfD of this notebook or script has the name of a method of the package" in done.stderr


CHANGES = {
    "a function": ("from fedrepro.core import errors", "errors.short = len"),
    "a method": ("from fedrepro.engine.method import FedAvg", "FedAvg.loss = lambda *_: 0"),
    "a data set": (
        "from fedrepro.data import datasets",
        "datasets.DATA_CARDS['digits'] = datasets.DataCard('digits', dict)",
    ),
    "a switch": ("import torch", "torch.set_default_dtype(torch.float64)"),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("then", ["raise ValueError('not yet')", ""])
def test_what_a_file_changes_is_put_back_however_it_ends(files, change, then):
    "Also where the file raises afterwards"
    before = (
        errors.short,
        FedAvg.loss,
        datasets.DATA_CARDS["digits"],
        torch.get_default_dtype(),
    )
    with pytest.raises(
        InputError, match="ValueError: not yet" if then else "it sets|replaces|is a"
    ):
        files(changes="\n".join([*CHANGES[change], then]))
    assert before == (
        errors.short,
        FedAvg.loss,
        datasets.DATA_CARDS["digits"],
        torch.get_default_dtype(),
    )


def test_an_object_of_the_package_may_be_a_global_of_an_own_file(files, tmp_path):
    "A federation is a dataclass with a `dtype`, and no array"
    files(
        holds_x="from fedrepro import FedAvg\nfrom fedrepro.checks.harness import tiny\n"
        "HERE = tiny()\nclass Holds(FedAvg):\n    pass\n"
    )
    (run,) = planned(tmp_path, methods={"Holds": {}})
    assert source(run)


def test_an_array_of_objects_is_known_by_what_it_holds():
    def made():
        return np.array(["".join(["c", "at"]), "".join(["do", "g"])], dtype=object)

    assert own_digest((made(),), True) == own_digest((made(),), True)
    other = np.array(["cat", "cow"], dtype=object)
    assert own_digest((made(),), True) != own_digest((other,), True)


def test_a_tensor_of_half_the_bits_is_known_by_what_it_holds():
    half = torch.tensor([1.0, 2.0], dtype=torch.bfloat16)
    assert own_digest((half,), True) == own_digest((half.clone(),), True)
    assert own_digest((half,), True) != own_digest((half.float(),), True)
    assert own_digest((half,), True) != own_digest((half + 1,), True)


def test_what_follows_from_a_clock_is_found_inside_a_condition_too():
    text = b"import time\nif True:\n    NOW = time.time()\nSTAMP = NOW\nRATE = 0.1\n"
    assert own_modules.unrepeatable_names(text) == {"NOW", "STAMP"}


PATCHES = {
    "reset_parameters of Linear, which is PyTorch's": (
        "from torch import nn\nnn.Linear.reset_parameters = lambda self: nn.init.zeros_(self.weight)\n"
    ),
    "cross_entropy of torch.nn.functional, which is PyTorch's": (
        "import torch.nn.functional as F\nF.cross_entropy = lambda logits, y: F.nll_loss(logits, y)\n"
    ),
    "INIT of fedrepro.engine.federation, which is the package's": (
        "from fedrepro.engine import federation\nfederation.INIT = 11\n"
    ),
}


@pytest.mark.parametrize("what", PATCHES)
def test_a_file_may_not_replace_what_computes_others(tmp_path, what):
    "Else FedAvg would have other numbers under its own name"
    before = nn.Linear.reset_parameters, nn.functional.cross_entropy, federation.INIT
    file = tmp_path / "patch.py"
    file.write_text(PATCHES[what])
    with one_line(f"it replaces {what}"):
        import_file(file)
    assert before == (nn.Linear.reset_parameters, nn.functional.cross_entropy, federation.INIT)


def test_tables_and_networks_of_a_file_are_known_by_what_they_hold():
    write = own_modules.PlainText("/folder/own.py").write
    table = pd.DataFrame({"a": [1, 2], "b": ["x", "y"]})
    other = table.assign(a=[1, 3])
    assert write(table) == write(table.copy())
    assert write(table) != write(other)
    assert write(table["a"]) != write(other["a"])
    layer = nn.Linear(3, 2)
    assert write(layer) == write(layer)
    assert write(layer) != write(nn.Linear(3, 2))
    assert "Uninitialized" in write(nn.LazyLinear(2))


def test_an_object_of_a_file_counts_by_what_it_holds(files):
    "Such as a configuration that was read; not one that asks a clock"
    text = (
        "import time\nclass Config:\n    def __init__(self, lr):\n        self.lr = lr\n"
        "class Log:\n    def __init__(self):\n        self.start = time.time()\n"
        "CONFIG = Config(0.25)\nLOG = Log()\n"
    )
    files(held_o=text + OWN.format("", "server"))
    values = own_modules.plain_values(sys.modules["held_o"])
    assert "CONFIG = Config['lr': 0.25]" in values
    assert not any(value.startswith("LOG") for value in values)
