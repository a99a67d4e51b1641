"The order of a sweep: what its steps may name"

import pytest

from fedrepro.experiments.specs import load_spec
from fedrepro.experiments.sweep import accepted_names, read_order
from toy import SMALL, one_line, written


@pytest.fixture
def specs(tmp_path):
    "A table whose base names the data set, with one column that names another"
    elsewhere = {"label": "elsewhere", "dataset": "MNIST", "source": "guess: toy"}
    table = SMALL | {"columns": [{"label": "here"}, elsewhere]}
    return {"toy/x": load_spec(written(tmp_path, table))}


def test_a_step_may_name_the_data_set_of_the_base_or_of_a_column_or_a_label(specs, tmp_path):
    assert accepted_names(list(specs.values()))["places"] == {
        "here",
        "elsewhere",
        "digits",
        "MNIST",
    }
    order = tmp_path / "order.toml"
    order.write_text('[[step]]\nspecs = ["toy"]\nplaces = ["digits", "elsewhere"]\n')
    first, everything = read_order(order, specs)
    assert first.places == ("digits", "elsewhere")
    assert not everything.places


def test_a_step_that_names_what_no_spec_has_is_refused(specs, tmp_path):
    order = tmp_path / "order.toml"
    order.write_text('[[step]]\nspecs = ["toy"]\nplaces = ["digit"]\n')
    with one_line("step 1.places: name 'digit'", "digits"):
        read_order(order, specs)
