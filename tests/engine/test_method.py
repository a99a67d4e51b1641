"""The method and the path of a client's round as a newcomer meets them: few hooks, few frames, one place for a method's name."""

import ast
import io
import re
import sys
import tokenize
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch

import fedrepro
from fedrepro.checks.contract import Case, limit_law
from fedrepro.checks.harness import LOCAL, tiny
from fedrepro.core.errors import InputError
from fedrepro.core.trees import same_bits
from fedrepro.engine.client import plan_batches
from fedrepro.engine.declarations import with_hooks
from fedrepro.engine.federation import Federation, in_precision
from fedrepro.engine.forks import ActiveRun, run_forked
from fedrepro.engine.method import HOOKS, FedAvg, import_file, load_methods
from fedrepro.engine.rounds import run
from fedrepro.experiments.jobs import try_round
from fedrepro.methods.fedadc import FedADC
from fedrepro.methods.lfd import LfD
from fedrepro.methods.objective import Constraint, outputs
from fedrepro.models import networks
from toy import OURS, one_line

PACKAGE = Path(fedrepro.__file__).parent


def test_a_method_has_at_most_fourteen_hooks_each_with_a_docstring():
    assert len(HOOKS) <= 14
    assert all(getattr(FedAvg, n).__doc__ for n in HOOKS)
    page = (PACKAGE.parent / "nbs/04_engine/04_method.ipynb").read_text()
    assert not [n for n in HOOKS if f"| `{n}(" not in page]  # the table of hooks has them all


def test_no_method_overrides_what_is_no_hook():
    "A method of a class of FedAvg's that the engine calls is a hook, or is declared"
    known = {*HOOKS, "communication", "invariants", "phase", "__post_init__"}
    plain = {n for n in vars(FedAvg) if not n.startswith("__")} - known
    assert plain == {
        "version",
        "paper",
        "personal",
        "pooled",
        "evaluated",
        "positive",
        "fractions",
        "signed",
        "waits",
        "distances",
        "excluded",
        "limit",
        "check_settings",
        *(f.name for f in fields(FedAvg)),
    }


def test_a_federation_has_few_fields_and_none_can_be_set():
    assert len(fields(Federation)) <= 9
    with pytest.raises(AttributeError):
        tiny().seed = 1


# --- settings

REFUSED = {  # hyper-parameters that each method refuses, one at a time
    "SCAFFOLD": dict(lr=0.0, epochs=0),
    "SlowMo": dict(lr=0.0),
    "FedRS": dict(alpha=1.5),
    "pFedMe": dict(inner_steps=0, judged_by="v"),
    "FedExP": dict(eps=0.0),
    "FedDyn": dict(alpha=-1.0),
    "FedAvgM": dict(beta=float("nan")),
    "MOON": dict(tau=0.0, mu=float("inf")),
    "FedGKD": dict(tau=0.0, models=1.5),
    "IFCA": dict(models=0),
    "FedNTD": dict(tau=0.0, beta=-1.0),
    "FedDC": dict(lr=0.0, lr_decay=0.0, epochs=0),
    "FedCDA": dict(models=0, batches=0, smooth=-1.0),
    "InCo": dict(clip=-0.1),
    "FedDrift": dict(delta=-1.0, models=0, previous="now", variant="fixed"),
    "Flash": dict(variant="literal", beta2=0.0, beta1=1.5, tau=0.0),
    "Union": dict(epochs=-1),
    "Constraint": dict(kind="logits", part="body", mu=-1.0),
    "LfD": dict(tau=0.0, outer_tau=0.0, margin=1.1, weight=-1.0, first="none"),
    "AdaptiveFedAvg": dict(beta2=1.0, variant="fixed"),
    "FedPAC": dict(variant="fixed"),
    "FedCCFA": dict(anchors="one", balanced_samples=0),
    "FedBSS": dict(selection="sine", aggregation="mean", warm_up=-1),
    "FedADC": dict(variant="red", lr=0.0, epochs=0, beta=-0.1, beta_local=-0.1, phi=1.1),
    "FedADCPlus": dict(calibration="head", calibration_mu=-1.0, lam=1.5, temperature=0.0),
}


@pytest.mark.parametrize(
    "name, field", [(name, field) for name, fields in REFUSED.items() for field in fields]
)
def test_impossible_settings_are_refused(name, field):
    "In one line that names the method, the setting and its value"
    value = REFUSED[name][field]
    said = (
        f"{name} {field} {value!r} is unknown;"
        if isinstance(value, str)
        else f"{name} {field}: expected"
    )
    with one_line(said, repr(value)):
        load_methods()[name](**{field: value})


def test_settings_of_another_kind_are_refused():
    with one_line("FedAvg epochs: expected a whole number of at least 0, got '5'"):
        FedAvg(epochs="5")
    with one_line("FedAvg lr: expected a number of at least 0, got '0.1'"):
        FedAvg(lr="0.1")


def test_the_choice_of_none_is_not_listed():
    with one_line(
        "FedADCPlus calibration 'head' is unknown; accepted: plain, proximal, self-confidence"
    ):
        load_methods()["FedADCPlus"](calibration="head")


def test_a_choice_may_be_of_numbers():
    @dataclass
    class Order(FedAvg, listed=False):
        order: Literal[1, 2] = 1

    assert Order(order=2).order == 2
    with one_line("Order order: expected one of 1, 2, got 3"):
        Order(order=3)
    with one_line("Order order: expected one of 1, 2, got True"):
        Order(order=True)


def test_fields_are_checked_where_types_are_texts():
    "As under `from __future__ import annotations`"

    @dataclass
    class Texts(FedAvg, listed=False):
        steps: "int" = 1
        kind: "Literal['near', 'far']" = "near"

    with one_line("Texts steps: expected a whole number of at least 0, got 2.5"):
        Texts(steps=2.5)
    with one_line("Texts kind 'fur' is unknown; did you mean 'far'?"):
        Texts(kind="fur")


def test_settings_that_contradict_each_other_are_refused():
    with pytest.raises(InputError, match="margins of which term"):
        LfD(own_margins=True, margin_in_regulariser=False)
    with pytest.raises(InputError, match="momentum"):
        FedADC(variant="double_momentum", momentum=0.9)


# --- what goes wrong without a word


def ran(method, federation=None, rounds=1):
    return run(method, federation or tiny(), rounds).snapshot


def test_a_phase_may_have_the_name_of_an_earlier_one():
    "The last one's parameters are the client's result"

    def phases(self, client):
        return [
            self.phase(client, "a", train="head."),
            self.phase(client, "b"),
            self.phase(client, "a", lr=0.0),
        ]

    def twice(self, client):
        return phases(self, client)[:2]

    same, other = (
        ran(with_hooks(FedAvg(**LOCAL), {"local_phases": f})).server["params"]
        for f in (phases, twice)
    )
    assert same_bits(same, other)


def test_a_reply_is_one_for_each_participant():
    with pytest.raises(InputError, match="FedAvg.reply returned .* a list of 3 dicts"):
        ran(with_hooks(FedAvg(**LOCAL), {"reply": lambda self, server, exchange: [{}]}))


def test_hooks_of_one_object_are_not_anothers():
    own = with_hooks(
        FedAvg(**LOCAL),
        {
            "adjust_gradient": lambda self, client, params, grads: {
                n: g / 2 for n, g in grads.items()
            }
        },
    )
    both = [ActiveRun(method, tiny(), 1) for method in (FedAvg(**LOCAL), own)]
    run_forked(both)
    for active in both:
        assert same_bits(active.at.server["params"], ran(active.method).server["params"])


def test_a_methods_file_is_known_by_its_whole_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("nova_xyz.py", "my.method.py", "__main__.py"):
        Path(name).write_text("MARK = 1\n")
    for _ in range(2):
        import_file(Path("nova_xyz.py"))
    with pytest.raises(InputError, match="has no dot; rename the file"):
        import_file(Path("my.method.py"))
    with pytest.raises(InputError, match="is called '__main__' already"):
        import_file(Path("__main__.py"))


def test_a_seed_of_cohorts_may_be_numpys():
    assert replace(tiny(), cohorts=np.int64(5)).cohort(0) == replace(tiny(), cohorts=5).cohort(0)


def test_a_network_that_needs_two_samples_gets_them(normed):
    "65 samples in batches of 64 become 63 and 2; one sample alone is no step; other networks have their short batches"

    def sizes(net, n):
        return [
            len(rows)
            for rows, _ in plan_batches(
                replace(normed.client(0, 0, {}, {}), net=net, indices=torch.arange(n)), phase
            )[0]
        ]

    phase = FedAvg(**LOCAL | dict(batch_size=8)).phase(normed.client(0, 0, {}, {}))
    assert [sizes(normed.net, n) for n in (1, 8, 9, 17, 18)] == [
        [],
        [8],
        [7, 2],
        [8, 7, 2],
        [8, 8, 2],
    ]
    assert sizes(tiny().net, 9) == [8, 1]
    phase = replace(phase, batch_size=2)
    with pytest.raises(
        InputError,
        match="client 0: norm cannot be trained on one sample, which batches of 2 leave it",
    ):
        sizes(normed.net, 3)


def test_a_law_holds_with_batch_norm(normed):
    assert next(limit_law(Case(LfD(**LOCAL), normed))).ok


def test_a_law_holds_in_half_the_bits():
    half = replace(tiny(), dtype=torch.float32, net=in_precision(tiny().net, "bf16"))
    assert next(limit_law(Case(Constraint(**LOCAL), half))).ok


def test_parts_in_half_the_bits_are_those_of_the_whole_network():
    net = in_precision(networks.network("moon_cnn"), "bf16").for_clients
    x = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    params = net.init(0)
    parts = outputs(net, params, x)
    assert [*parts] == ["extractor", "header", "classifier"]
    assert all(t.dtype is torch.float32 for t in parts.values())
    assert torch.equal(parts["header"], net.features(params, x))
    assert torch.equal(parts["classifier"], net(params, x))


# --- the path of a client's round


def frames(target: str, last: str) -> list[str]:
    "Our frames from `last` to the first call of the function `target` in a round of FedAvg"
    found: list[str] = []

    def trace(frame, event, arg):
        if event != "call" or found or frame.f_code.co_name != target:
            return
        while frame is not None and frame.f_code.co_name != last:
            if frame.f_code.co_filename.startswith(str(PACKAGE)):
                found.append(frame.f_code.co_name)
            frame = frame.f_back

    sys.setprofile(trace)
    try:
        run(FedAvg(**LOCAL), tiny(), 1)
    finally:
        sys.setprofile(None)
    return found


@pytest.mark.parametrize(
    "target, last, most", [("_wrapped_call_impl", "run", 8), ("augment", "train", 3)]
)
def test_few_frames_lead_to_the_network_and_to_augmentation(target, last, most):
    found = frames(target, last)
    assert 0 < len(found) <= most, found


def names_in(source: str) -> set[str]:
    "Identifiers and whole strings of a module, without its docstrings and comments"
    tree = ast.parse(source)
    docs = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))
        and node.body
        and isinstance(node.body[0], ast.Expr)
        and isinstance(node.body[0].value, ast.Constant)
    }
    words = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} | {
        node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)
    }
    words |= {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for alias in node.names
    }
    return words | {
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs
    }


def strangers(root: Path) -> list[str]:
    "Where a method is named outside the package of methods, but for the table of colours, the papers' recipes on the cards of data sets and the facade"
    cards = {"data/mnist_cifar.py", "data/images.py", "data/synthetic.py"}
    free = cards | {"reporting/curves.py", "__init__.py", "_modidx.py"}
    files = [
        f
        for f in sorted(root.rglob("*.py"))
        if f.relative_to(root).parts[0] != "methods" and f.relative_to(root).as_posix() not in free
    ]
    watched = set(OURS) - {"FedAvg"}
    return [
        f"{f.relative_to(root)}: {name}"
        for f in files
        for name in sorted(names_in(f.read_text()) & watched)
    ]


def test_no_module_but_the_methods_names_a_method():
    assert strangers(PACKAGE) == []


def test_a_planted_name_is_found(tmp_path):
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine/rounds.py").write_text(
        '"MOON in a docstring is fine"\n# and SCAFFOLD in a comment\nif name == "MOON": pass\n'
    )
    assert strangers(tmp_path) == ["engine/rounds.py: MOON"]


@pytest.mark.parametrize("folder", ["engine", "methods", "executors"])
def test_no_shortcut_around_types_or_control_flow(folder):
    for file in (PACKAGE / folder).glob("*.py"):
        source = file.read_text()
        tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
        code = [t.string for t in tokens if t.type == tokenize.NAME]
        assert "StopIteration" not in code and not re.search(
            r"__dict__\.update|yield from", source
        ), file.name
        if folder == "executors":
            continue  # a worker process keeps its data set for as long as it lives
        assert "global" not in code and not [
            t for t in tokens if t.type == tokenize.COMMENT and "type: ignore" in t.string
        ], file.name


# --- classes that are no methods


@pytest.mark.parametrize(
    "hooks, line",
    [
        (
            {"loss": lambda self, client, params, x, y: 0},
            r"Odd.loss is one of \(self, client, params, x, y\); expected a function of "
            r"\(self, client, params, batch\)",
        ),
        ({"aggregate": lambda self, exchange: 0}, r"Odd.aggregate is one of \(self, exchange\)"),
        ({"aggregate": None}, r"Odd.aggregate is None; expected a function of"),
        ({"agregate": lambda self, server, exchange: server}, "did you mean 'aggregate'"),
        ({"client_results": lambda self, c, w, r: ({}, {})}, "did you mean 'client_result'"),
        ({"adjust_gradients": lambda self, c, w, g: g}, "did you mean 'adjust_gradient'"),
    ],
)
def test_a_class_with_something_else_for_a_hook_is_refused(hooks, line):
    with pytest.raises(InputError, match=line):
        type("Odd", (FedAvg,), hooks, listed=False)


def test_a_hook_may_have_defaults_and_a_class_functions_of_its_own():
    "A helper whose name is near a hook's goes with the hook itself"

    class Even(FedAvg, listed=False):
        def loss(self, client, params, batch, scale=2.0):
            return scale * super().loss(client, params, batch)

        def aggregate(self, *given):
            return super().aggregate(*given)

        def local_phase(self, client):
            return self.phase(client)

        def local_phases(self, client):
            return [self.local_phase(client)]

        def agregate_rows(self, rows):
            return rows

    assert ran(Even(**LOCAL)).round > 0


def test_fields_are_checked_again_when_a_run_begins():
    "Also those of a class whose __post_init__ forgets FedAvg's, and those set afterwards"

    @dataclass
    class Careless(FedAvg):
        def __post_init__(self):
            pass

    with pytest.raises(InputError, match="Careless batch_size: .* got -1"):
        ran(Careless(**LOCAL | dict(batch_size=-1)))
    changed = FedAvg(**LOCAL)
    changed.lr = -0.1
    with pytest.raises(InputError, match="FedAvg lr: .* got -0.1"):
        ran(changed)


def from_elsewhere(base):
    "A class with functions of another framework's names alone"

    class FromElsewhere(base):
        def fit(self, parameters, config):
            return parameters, 10, {}

        def aggregate_fit(self, rounds, results):
            return results

    return FromElsewhere


@pytest.mark.parametrize("base", [FedAvg, Constraint])
def test_functions_that_nothing_calls_are_refused_before_the_first_round(base):
    "The class would run as the method that it is derived from, under its own name"
    words = f"nothing calls fit, aggregate_fit, and all its hooks are those of {base.__name__}"
    method = from_elsewhere(base)(**LOCAL)
    with pytest.raises(InputError, match=words):
        ran(method)
    with pytest.raises(InputError, match=words):
        try_round(method, tiny())


def test_functions_that_something_calls_are_accepted():
    "Another name; a function for oneself; a part of a base's hook; a mixin; hooks set on the object"

    class Another(FedAvg):
        pass

    class Private(FedAvg):
        def _plot(self):
            return None

    class Penalised(FedAvg, listed=False):
        def loss(self, client, params, batch):
            return super().loss(client, params, batch) + self.penalty(params)

    class Lasso(Penalised):
        def penalty(self, params):
            return 1e-3 * sum(t.abs().sum() for t in params.values())

    class Ridge:
        def loss(self, client, params, batch):
            return super().loss(client, params, batch) + self.ridge(params)

    class FromMixin(Ridge, FedAvg):
        def ridge(self, params):
            return 1e-3 * sum((t**2).sum() for t in params.values())

    class SetLater(FedAvg):
        def __post_init__(self):
            super().__post_init__()
            self.loss = self.own_loss

        def own_loss(self, client, params, batch):
            return super().loss(client, params, batch)

    for cls in (Another, Private, Lasso, FromMixin, SetLater):
        assert ran(cls(**LOCAL)).round > 0, cls
    replaced = with_hooks(from_elsewhere(FedAvg)(**LOCAL), {"loss": FedAvg.loss})
    assert ran(replaced).round > 0
