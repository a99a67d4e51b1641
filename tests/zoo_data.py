"""Small data sets as people have them: what is accepted, and what is refused with which words

Each is a function of a folder that returns the arguments of `Dataset` but for the name; files are written and read there."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from PIL import Image
from torchvision.datasets import ImageFolder

from fedrepro.data.datasets import recipe_for
from fedrepro.data.transforms import Recipe

MEASURED = Recipe("own", (), ())


@dataclass(frozen=True)
class Case:
    "A data set and what is expected of it"

    name: str
    make: Callable[[Path], dict]
    said: tuple[str, ...] = ()  # words of the line with which it is refused; none: it is accepted
    scale: float = 1.0  # of an accepted one: what its pixels are divided by


CASES: list[Case] = []


def case(*said: str, scale: float = 1.0):
    "Put a function into the zoo"

    def put(make):
        CASES.append(Case(make.__name__.replace("_", " "), make, said, scale))
        return make

    return put


# --- what they are made of


def rng():
    return np.random.default_rng(5)


def labels(n: int, classes: int = 3) -> torch.Tensor:
    "Class numbers in turns"
    return torch.arange(n) % classes


def data(train_x, test_x, classes: int = 3, **more) -> dict:
    "The arguments of a data set of these samples, with labels in turns"
    return (
        dict(
            train_x=train_x,
            train_y=labels(len(train_x), classes),
            test_x=test_x,
            test_y=labels(len(test_x), classes),
            class_names=tuple("abcdefghij"[:classes]),
            recipe=MEASURED,
        )
        | more
    )


def pictures(
    *shape: int, dtype=torch.uint8, low: int = 0, high: int = 256, n: int = 24, m: int = 9, **more
) -> dict:
    "Random pictures of whole numbers in [low, high)"
    x = torch.from_numpy(rng().integers(low, high, (n + m, *shape)))
    return data(x[:n].to(dtype), x[n:].to(dtype), **more)


def floats(*shape: int, dtype=torch.float32, n: int = 24, m: int = 9, **more) -> dict:
    "Random pictures or rows in [0, 1)"
    x = torch.from_numpy(rng().random((n + m, *shape))).to(dtype)
    return data(x[:n], x[n:], **more)


def usual(**more) -> dict:
    return pictures(1, 8, 8) | more  # with something changed


# --- pictures that are accepted


@case(scale=255.0)
def grey_bytes(folder):
    return pictures(1, 8, 8)


@case(scale=255.0)
def colour_that_is_not_square(folder):
    return pictures(3, 5, 9)


@case(scale=255.0)
def two_channels(folder):
    return pictures(2, 6, 4)


@case(scale=255.0)
def twelve_channels(folder):
    return pictures(12, 4, 4)


@case()
def one_bit(folder):
    return pictures(1, 8, 8, high=2, dtype=torch.bool)


@case(scale=255.0)
def one_bit_in_bytes(folder):
    return pictures(1, 8, 8, high=2)


@case()
def unsigned_16_bit(folder):
    return pictures(1, 8, 8, high=2**16, dtype=torch.uint16)


@case(scale=65_535.0)
def unsigned_16_bit_with_its_scale(folder):
    return pictures(1, 8, 8, high=2**16, dtype=torch.uint16, scale=65_535.0)


@case()
def tomography_in_int16(folder):
    return pictures(1, 8, 8, low=-1024, high=3072, dtype=torch.int16)


@case(scale=4_095.0)
def twelve_bits_in_int32(folder):
    return pictures(2, 8, 8, high=4096, dtype=torch.int32, scale=4_095)


@case()
def large_int32(folder):
    return pictures(1, 8, 8, low=-(2**31), high=2**31, dtype=torch.int32)


@case()
def float32(folder):
    return floats(3, 8, 8)


@case()
def float64(folder):
    return floats(3, 8, 8, dtype=torch.float64)


@case()
def float16(folder):
    return floats(1, 8, 8, dtype=torch.float16)


@case()
def bfloat16(folder):
    return floats(1, 8, 8, dtype=torch.bfloat16)


@case(scale=255.0)
def all_white_but_one_channel(folder):
    parts = pictures(3, 8, 8)
    for part in ("train_x", "test_x"):
        parts[part][:, 1:] = 255
    return parts


@case(scale=255.0)
def permuted_from_channels_last(folder):
    x = torch.from_numpy(rng().integers(0, 256, (33, 8, 9, 3), np.uint8)).permute(0, 3, 1, 2)
    return data(x[:24], x[24:])


@case()
def a_series_as_one_row(folder):
    return floats(6, 1, 50)


@case(scale=255.0)
def one_expanded_picture(folder):
    x = torch.from_numpy(rng().integers(0, 256, (1, 3, 8, 8), np.uint8)).expand(24, 3, 8, 8)
    return data(x, x[:9])


@case()
def pixels_with_a_gradient(folder):
    parts = floats(1, 8, 8)
    return parts | {"train_x": parts["train_x"].requires_grad_()}


@case()
def the_test_set_is_the_training_set(folder):
    parts = floats(1, 4, 4, dtype=torch.float64)
    return parts | {"test_x": parts["train_x"], "test_y": parts["train_y"]}


@case()
def a_table_with_its_stated_means(folder):
    parts = data(torch.tensor([[20.0, -3.0], [40.0, -5.0], [30.0, -7.0]]), torch.ones(3, 2))
    std = float((200 / 3) ** 0.5), float((8 / 3) ** 0.5)
    return parts | {"recipe": Recipe("own", (30.0, -5.0), std)}


@case()
def the_usual_half_and_half(folder):
    return floats(3, 8, 8, recipe=Recipe("halves", (0.5,), (0.5,)))


@case()
def statistics_as_tensors(folder):
    parts = floats(3, 8, 8)
    mean = parts["train_x"].mean((0, 2, 3))
    std = parts["train_x"].std((0, 2, 3))
    return parts | {"recipe": Recipe("own", mean, std)}


@case(scale=255.0)
def a_folder_of_pictures(folder):
    "A folder for each class, as torchvision reads them"
    r = rng()
    for part, n in (("train", 8), ("test", 3)):
        for name in ("cat", "dog", "emu"):
            (folder / part / name).mkdir(parents=True)
            for i in range(n):
                Image.fromarray(r.integers(0, 256, (7, 5, 3), np.uint8)).save(
                    folder / part / name / f"{i}.png"
                )
    out: dict = {}
    for part in ("train", "test"):
        found = ImageFolder(folder / part)
        out[f"{part}_x"] = torch.stack(
            [torch.from_numpy(np.array(x)).permute(2, 0, 1) for x, _ in found]
        )
        out |= {f"{part}_y": torch.tensor(found.targets), "class_names": found.classes}
    return out | {"recipe": MEASURED}


@case(scale=16.0)
def an_npz_file(folder):
    r = rng()
    kept = {
        f"{part}_{k}": v
        for part, n in (("train", 24), ("test", 9))
        for k, v in (("x", r.integers(0, 17, (n, 8, 8), np.uint8)), ("y", r.permutation(n) % 3))
    }
    np.savez(folder / "own.npz", **kept)
    with np.load(folder / "own.npz", allow_pickle=False) as packed:
        found = {k: torch.from_numpy(packed[k]) for k in packed.files}
    x = {f"{part}_x": found[f"{part}_x"][:, None] for part in ("train", "test")}
    return found | x | {"class_names": np.array(["a", "b", "c"]), "recipe": MEASURED, "scale": 16}


# --- tables that are accepted


def table_file(folder, **columns) -> pd.DataFrame:
    "A csv of these columns, written and read"
    pd.DataFrame(columns).to_csv(folder / "own.csv", index=False)
    return pd.read_csv(folder / "own.csv")


def split_table(frame: pd.DataFrame, answer: str) -> dict:
    "A frame as a data set: `answer` is the column of the classes, in words or numbers"
    names, y = np.unique(frame.pop(answer).to_numpy(str), return_inverse=True)
    x = torch.from_numpy(frame.to_numpy())
    y = torch.from_numpy(y)
    return dict(
        train_x=x[:24],
        train_y=y[:24],
        test_x=x[24:],
        test_y=y[24:],
        class_names=tuple(names),
        recipe=MEASURED,
    )


@case()
def a_csv_with_classes_in_words(folder):
    r = rng()
    return split_table(
        table_file(
            folder,
            age=r.normal(40, 12, 33),
            income=r.lognormal(10, 1, 33),
            answer=np.resize(["no", "yes", "perhaps"], 33),
        ),
        "answer",
    )


@case()
def a_csv_of_whole_numbers_and_times(folder):
    r = rng()
    return split_table(
        table_file(
            folder,
            time=1_700_000_000 + r.integers(0, 999, 33),
            number=r.integers(0, 5, 33),
            answer=np.resize([3, 5, 7], 33),
        ),
        "answer",
    )


@case()
def huge_and_tiny_units(folder):
    x = torch.from_numpy(rng().normal(size=(33, 9)) * 10.0 ** np.arange(-12, 24, 4))
    return data(x[:24], x[24:])


@case()
def a_small_spread_far_from_zero(folder):
    x = torch.from_numpy(1e9 + rng().normal(size=(33, 3)))
    return data(x[:24], x[24:])


@case()
def a_column_that_never_changes(folder):
    x = torch.from_numpy(rng().normal(size=(33, 3)))
    x[:, 1] = 0.1
    return data(x[:24], x[24:])


@case()
def one_feature(folder):
    return floats(1)


@case()
def yes_and_no_answers(folder):
    x = torch.from_numpy(rng().integers(0, 2, (33, 20)).astype(bool))
    return data(x[:24], x[24:])


# --- few samples and classes


@case(scale=255.0)
def one_class(folder):
    return pictures(1, 8, 8, classes=1)


@case(scale=255.0)
def a_class_that_nobody_has(folder):
    return usual(class_names=("a", "b", "c", "nothing of it"))


@case(scale=255.0)
def a_class_that_only_the_test_set_has(folder):
    return usual(train_y=labels(24, 2))


@case(scale=255.0)
def one_sample_a_client(folder):
    return pictures(1, 8, 8, n=3)


@case(scale=255.0)
def one_test_sample(folder):
    return pictures(1, 8, 8, m=1)


@case(scale=255.0)
def sorted_by_class(folder):
    return usual(train_y=labels(24).sort().values)


@case(scale=255.0)
def people_as_groups(folder):
    return usual(train_groups=labels(24, 4), test_groups=labels(9, 4))


# --- labels that are refused


@case("own: train_y: labels from 1 to 3, expected 0 to 2 for 3 class names", "subtract 1")
def labels_from_one(folder):
    return usual(train_y=labels(24) + 1)


@case("own: test_y: labels from 1 to 3", "subtract 1")
def test_labels_from_one(folder):
    return usual(test_y=labels(9) + 1)


@case("own: train_y: labels from -1 to 2", "8 are -1: samples without a label")
def unlabelled_samples(folder):
    return usual(train_y=labels(24).masked_fill(labels(24) == 0, -1))


@case("own: test_y: labels from -1 to 1", "expected 0 to 2")
def unlabelled_test_samples(folder):
    return usual(test_y=labels(9) - 1)


@case(
    "own: train_y: labels from 0 to 4, expected 0 to 2", "class_names needs a name for each class"
)
def more_labels_than_classes(folder):
    return usual(train_y=labels(24, 5))


@case("own: train_y: labels from 0 to 255, expected 0 to 2")
def a_label_for_the_edge(folder):
    return usual(train_y=torch.cat([labels(23), torch.tensor([255])]))


@case("own: train_y: expected whole numbers of type int64", "got uint8 [0, 1, 2]; y.long()")
def labels_in_bytes(folder):
    return usual(train_y=labels(24).byte())


@case("own: test_y: expected whole numbers of type int64", "got int32 [0, 1, 2]; y.long()")
def labels_in_int32(folder):
    return usual(test_y=labels(9).int())


@case("own: train_y: expected whole numbers", "got float32 [0.0, 1.0, 2.0]; y.long()")
def labels_as_floats(folder):
    return usual(train_y=labels(24).float())


@case("own: train_y: expected whole numbers", "got float64 [0.0, 0.5, 1.0]")
def a_target_of_regression(folder):
    return usual(train_y=labels(24).double() / 2)


@case("own: train_y: expected whole numbers", "got float32 [nan")
def labels_with_gaps(folder):
    return usual(train_y=torch.full((24,), torch.nan))


@case("own: train_y: expected whole numbers", "got bool", "y.long()")
def labels_as_truth(folder):
    return usual(train_y=labels(24) > 0)


@case("own: train_y: expected a tensor, got list of words like 'cat'", "numpy.unique")
def labels_in_words(folder):
    return usual(train_y=["cat", "dog", "emu"] * 8)


@case("own: train_y: expected a tensor, got ndarray of words like b'cat'", "numpy.unique")
def labels_in_words_of_bytes(folder):
    return usual(train_y=np.resize([b"cat", b"dog", b"emu"], 24))


@case("own: train_y: expected a tensor, got Series of words like 'cat'", "numpy.unique")
def a_column_of_words(folder):
    return usual(train_y=pd.Series(["cat", "dog", "emu"] * 8))


@case("own: train_y: expected a tensor, got ndarray of int64 (24,)", "torch.from_numpy")
def labels_in_numpy(folder):
    return usual(train_y=labels(24).numpy())


@case("own: train_y: expected a tensor, got list of int64 (24,)")
def labels_in_a_list(folder):
    return usual(train_y=labels(24).tolist())


@case("own: train_y: expected a tensor, got NoneType None")
def no_labels(folder):
    return usual(train_y=None)


@case("own: train_y: 23 labels for 24 samples")
def a_label_too_few(folder):
    return usual(train_y=labels(23))


@case("own: test_y: 24 labels for 9 samples")
def labels_of_the_other_part(folder):
    return usual(test_y=labels(24))


@case(
    "own: train_y: expected one class number a sample, shape (24,), got shape (24, 3)",
    "y.argmax(1)",
)
def one_hot_labels(folder):
    return usual(train_y=torch.eye(3)[labels(24)])


@case("own: train_y: expected one class number", "got shape (24, 1); take y[:, 0]")
def a_column_of_labels(folder):
    return usual(train_y=labels(24)[:, None])


# --- classes, groups, recipes that are refused


@case("own: class_names: expected the name of each class", "got 'abc'")
def one_text_for_all_classes(folder):
    return usual(class_names="abc")


@case("own: class_names: expected the name of each class", "got 3")
def their_number_for_the_classes(folder):
    return usual(class_names=3)


@case("own: class_names: expected", "got None")
def no_class_names(folder):
    return usual(class_names=None)


@case("own: class_names: expected", "got ()")
def empty_class_names(folder):
    return usual(class_names=())


@case("own: train_y: labels from 0 to 2, expected 0 to 1 for 2 class names")
def a_class_name_too_few(folder):
    return usual(class_names=("a", "b"))


@case("own: train_groups: 23 labels for 24 samples")
def a_group_too_few(folder):
    return usual(train_groups=labels(23), test_groups=labels(9))


@case("own: train_groups are given, but no test_groups")
def groups_of_one_part(folder):
    return usual(train_groups=labels(24))


@case("own: train_groups: labels from -1", "expected numbers from 0")
def a_group_of_nobody(folder):
    return usual(train_groups=labels(24) - 1, test_groups=labels(9))


@case("own: recipe 'LfD' has mean and std of 3 channels, the samples have 1")
def a_recipe_for_colour(folder):
    return usual(recipe=recipe_for("LfD", "CIFAR-10"))


@case("own: recipe: expected a Recipe", "got 'plain'")
def a_name_for_a_recipe(folder):
    return usual(recipe="plain")


@case("own: recipe 'flipped' changes pictures, not rows of a table")
def a_table_that_is_flipped(folder):
    return floats(5, recipe=replace(MEASURED, name="flipped", flip=True))


@case("own: recipe 'own' mirrors 8 pixels beyond the border, more than pictures of 1x8x8 have")
def a_mirror_larger_than_the_picture(folder):
    return usual(recipe=replace(MEASURED, crop=8, pad="reflect"))


@case("own: recipe 'own' has a mean of 125.3, the training samples / 255 go from 0 to 1; divide")
def a_mean_of_bytes(folder):
    return usual(recipe=Recipe("own", (125.3,), (63.0,)))


@case("own: recipe 'own' has a mean of 33.3, the training samples go from", "divide", "by 255")
def a_mean_of_bytes_for_floats(folder):
    return floats(1, 8, 8, recipe=Recipe("own", (33.3,), (78.6,)))


@case("recipe 'own': std: expected a number above 0, got 0.0")
def a_deviation_of_zero(folder):
    return usual(recipe=Recipe("own", (0.5,), (0.0,)))


@case("recipe 'own': expected a mean and a std for each channel, got 3 and 1")
def a_deviation_too_few(folder):
    return usual(recipe=Recipe("own", (0.5,) * 3, (0.2,)))


@case("own: scale: expected a number of at least 0, got -255")
def a_negative_scale(folder):
    return usual(scale=-255)


# --- pixels that are refused


@case("own: train_x: expected a tensor, got ndarray of uint8 (24, 1, 8, 8)", "torch.from_numpy")
def pictures_in_numpy(folder):
    return usual(train_x=np.zeros((24, 1, 8, 8), np.uint8))


@case(
    "own: train_x: expected a dense tensor of real numbers, got torch.uint64", "x.to(torch.int64)"
)
def unsigned_64_bit(folder):
    return pictures(1, 8, 8, dtype=torch.uint64)


@case("own: train_x: expected a dense tensor of real numbers, got torch.quint8 quantized")
def quantised(folder):
    x = torch.quantize_per_tensor(torch.rand(24, 1, 8, 8), 0.1, 0, torch.quint8)
    return usual(train_x=x)


@case("own: test_x: expected a dense tensor of real numbers, got torch.float32 meta")
def numbers_that_are_not_there(folder):
    return floats(1, 8, 8) | {"test_x": torch.empty(9, 1, 8, 8, device="meta")}


@case("own: train_x: expected a dense tensor of real numbers, got torch.float32 nested")
def nested_rows(folder):
    return usual(
        train_x=torch.nested.nested_tensor(
            [torch.rand(3, 4), torch.rand(2, 4)], layout=torch.jagged
        )
    )


@case("own: train_x: expected a tensor, got list", "rows of one shape")
def pictures_of_several_sizes(folder):
    return usual(train_x=[np.zeros((1, n, n)) for n in range(3, 27)])


@case("own: train_x: expected a tensor, got ndarray", "rows of one shape")
def an_array_of_objects(folder):
    return usual(train_x=np.array([None, {}, 3] * 8, object))


@case("own: train_x: expected a tensor, got DataFrame of words like")
def a_frame_with_words(folder):
    return usual(train_x=pd.DataFrame({"a": ["x", "y"] * 12, "b": range(24)}))


@case("own: train_x: 2 of 24 samples hold NaN", "the first is sample 3")
def gaps_in_the_training_set(folder):
    parts = floats(4)
    parts["train_x"][[3, 7], 2] = torch.nan
    return parts


@case("own: test_x: 1 of 9 samples hold NaN, infinite", "the first is sample 8")
def infinity_in_the_test_set(folder):
    parts = floats(1, 8, 8)
    parts["test_x"][8, 0, 0, 0] = -torch.inf
    return parts


@case("own: train_x: 24 of 24 samples hold", "float32 ends at 3.4e38")
def values_beyond_float32(folder):
    return floats(4, dtype=torch.float64) | {
        "train_x": torch.full((24, 4), 1e39, dtype=torch.float64)
    }


@case(
    "own: train_x: expected pictures (samples, channels, height, width) or a table",
    "got shape (24, 8, 8)",
    "x[:, None]",
)
def pictures_without_a_channel(folder):
    return pictures(8, 8)


@case("own: train_x: expected pictures", "got shape (24,); a table of one column is x[:, None]")
def a_single_column(folder):
    return pictures()


@case("own: train_x: expected pictures", "got shape (24, 1, 4, 4, 4)")
def volumes(folder):
    return pictures(1, 4, 4, 4)


@case("own: train_x: shape (24, 16, 12, 3) looks like pictures with their channels last", "permute")
def channels_last(folder):
    return pictures(16, 12, 3)


@case("own: train_x: shape (24, 28, 28, 1) looks like pictures with their channels last")
def grey_channels_last(folder):
    return pictures(28, 28, 1)


@case("own: train_x: there is nothing in it: its shape is (0, 1, 8, 8)")
def an_empty_training_set(folder):
    return pictures(1, 8, 8, n=0)


@case("own: test_x: there is nothing in it: its shape is (0, 5)")
def an_empty_test_set(folder):
    return floats(5, m=0)


@case("own: train_x: there is nothing in it: its shape is (24, 3, 0, 8)")
def pictures_without_height(folder):
    return pictures(3, 0, 8)


@case("own: train_x: expected a dense tensor of real numbers, got torch.complex64")
def complex_pixels(folder):
    return floats(1, 8, 8, dtype=torch.complex64)


@case("own: train_x: expected a dense tensor of real numbers", "torch.sparse_coo")
def a_sparse_table(folder):
    return floats(5) | {"train_x": torch.eye(24, 5).to_sparse()}


@case("own: training and test samples differ", "(24, 1, 8, 8)", "(9, 1, 8, 9)")
def test_pictures_of_another_size(folder):
    return usual(test_x=pictures(1, 8, 9)["test_x"])


@case("own: training and test samples differ", "train_x is torch.uint8", "test_x is torch.float32")
def a_test_set_in_floats(folder):
    return usual(test_x=floats(1, 8, 8)["test_x"])


# --- what a data set must equal


def exact(x) -> np.ndarray:
    "A tensor in long floats"
    return x.detach().to(torch.float64).numpy().astype(np.longdouble)


def by_hand(parts: dict, scale: float) -> tuple:
    "Mean and deviation of each channel, and normalised training and test samples, with numpy"
    train, test = (exact(parts[key]) / scale for key in ("train_x", "test_x"))
    axes = (0, 2, 3)[: train.ndim - 1]
    constant = np.ptp(train, axes) == 0
    mean = train.mean(axes)
    std = np.where(constant, 1, train.std(axes))
    given = parts["recipe"]
    if given.mean:
        mean, std = (np.array(v, np.longdouble) for v in (given.mean, given.std))
    wide = (-1, *[1] * (train.ndim - 2))
    return mean, std, *((x - mean.reshape(wide)) / std.reshape(wide) for x in (train, test))
