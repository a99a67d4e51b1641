"Whose line an error names"

import os
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

from fedrepro.core import errors
from fedrepro.core.errors import PACKAGE_FOLDER, InputError, is_own, number
from fedrepro.core.own_modules import own_file


@pytest.mark.parametrize("file", [errors.__file__, os.__file__, np.__file__, torch.__file__])
def test_no_file_of_a_user(file):
    assert not is_own(file)
    assert not own_file(file)


@pytest.mark.parametrize("folder", [f"{PACKAGE_FOLDER}_study", f"{Path(os.__file__).parent}_study"])
def test_a_folder_whose_name_begins_alike(folder):
    file = f"{folder}/own.py"
    assert is_own(file)
    assert own_file(file)


def test_a_link_to_the_package(tmp_path):
    (tmp_path / "linked").symlink_to(PACKAGE_FOLDER)
    file = str(tmp_path / "linked/core/errors.py")
    assert not is_own(file)
    assert not own_file(file)


def test_a_whole_number_that_no_float_holds_is_refused():
    with pytest.raises(errors.InputError, match="lr: expected a number of at least 0, got 1000"):
        errors.number("lr", 10**400, 0)


def test_a_number_of_numpy_is_compared_as_a_float():
    "An end of the range, or the largest float, may be beyond its own type"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for value in (np.float32(0.1), np.float16(0.5), np.float64(0.25)):
            found = number("lr", value, 0)
            assert type(found) is float and found == float(value)
        with pytest.raises(InputError, match="expected a number of at least 0"):
            number("lr", np.float32("inf"), 0)
        with pytest.raises(InputError, match="from 0 to 1"):
            number("share", np.float32(1.0000001), 0, 1)
