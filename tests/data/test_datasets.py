"""What people get wrong when they ask for data: each is one clear line, before anything is computed."""

import os
import pickle
import pickletools
import shlex
from dataclasses import replace
import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from fedrepro.core.errors import InputError
from fedrepro.data import datasets, mnist_cifar, sources, transforms
from fedrepro.data.download import Archive
from fedrepro.models.networks import network_names
from test_download import md5, quick, served, tar_gz  # noqa: F401 (fixtures)
from toy import from_files, one_line


def test_the_digits_are_those_of_scikit_learn():
    "They are read from its file, without the package"
    package = load_digits()
    digits = datasets.load("digits")
    images = torch.cat([digits.train_x, digits.test_x])[:, 0]
    assert (images.numpy() == package.images).all()
    assert digits.scale == package.images.max()
    assert (torch.cat([digits.train_y, digits.test_y]).numpy() == package.target).all()


@pytest.mark.parametrize(
    "wrong, said",
    [
        (
            dict(name="CIFAR10"),
            f"data set 'CIFAR10' is unknown; did you mean 'CIFAR-10'? accepted: {', '.join(sorted(datasets.DATA_CARDS))}",
        ),
        (dict(name="digits", recipe="FedNone"), "recipe 'FedNone' is unknown; accepted: FedADC"),
        (dict(name="digits", device="tpu7"), "device 'tpu7' cannot be used"),
        (dict(name="digits", device="cuda:99"), "device 'cuda:99' cannot be used"),
        (
            dict(name="digits", device="mps"),
            "device 'mps' cannot be used here: a run computes on 'cpu' or 'cuda'",
        ),
    ],
)
def test_unknown_names(wrong, said):
    with one_line(said):
        datasets.load(**wrong)


def test_only_the_current_gpu_is_used(monkeypatch):
    "All else of a run is there; another one becomes the current one first"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert datasets.usable_device("cuda:0") == torch.device("cuda:0")
    assert datasets.usable_device("cuda").index is None
    expected = (
        "the current GPU, cuda:0; expected 'cuda', for another GPU after torch.cuda.set_device(1)"
    )
    for other in ("cuda:1", torch.device("cuda", 1)):
        with one_line("device 'cuda:1' cannot be used here", expected):
            datasets.load("digits", device=other)


@pytest.mark.parametrize("name", [n for n, card in datasets.DATA_CARDS.items() if card.source])
def test_nothing_there(name, tmp_path):
    "An empty folder, no folder, a file in its place, and a folder in a file's: what is missing and how to get it"
    (tmp_path / "file").touch()
    source = datasets.DATA_CARDS[name].source
    how = f"fedrepro data {shlex.quote(name)}" if source.archives else "it cannot be downloaded"
    for file in source.files:
        (tmp_path / "folders" / source.folder / file).mkdir(parents=True)
    for root in (tmp_path, tmp_path / "none", tmp_path / "file", tmp_path / "folders"):
        with one_line(str(root / source.folder), *source.files, how, source.origin, "--data DIR"):
            datasets.load(name, data=root)


def test_a_pickle_is_not_opened_before_its_checksum(tmp_path, monkeypatch):
    monkeypatch.setattr(
        mnist_cifar, "_Batch", lambda *a, **k: pytest.fail("unpickled an unchecked file")
    )
    source = datasets.DATA_CARDS["CIFAR-10"].source
    (tmp_path / source.folder).mkdir()
    for f in source.files:
        (tmp_path / source.folder / f).write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    with pytest.raises(InputError, match="is damaged"):
        datasets.load("CIFAR-10", data=tmp_path)


# --- downloads from a server on this machine


def content_of(r):
    "Files of a made CIFAR, small, in the published format"

    def batch(n):
        return as_published(
            {
                b"data": r.integers(0, 256, (n, 3072), np.uint8),
                b"labels": r.integers(0, 10, n).tolist(),
            }
        )

    return {
        "batch_1": batch(5),
        "batch_2": batch(5),
        "test": batch(4),
        "meta": as_published({b"label_names": [b"%d" % i for i in range(10)]}),
    }


def as_published(content):
    "A pickle as Python 2 and numpy 1 wrote it: texts are bytes, an array names numpy.core.multiarray"

    def text(b):
        return b"U" + bytes([len(b)]) + b

    def number(i):
        return b"J" + int(i).to_bytes(4, "little", signed=True)

    def array(a):
        made = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\0\x85U\x01b\x87R"
        kind = b"cnumpy\ndtype\nU\x02u1K\0K\x01\x87R(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\0tb"
        return (
            made
            + b"(K\x01"
            + number(a.shape[0])
            + number(a.shape[1])
            + b"\x86"
            + kind
            + b"\x89T"
            + a.size.to_bytes(4, "little")
            + a.tobytes()
            + b"tb"
        )

    def one(v):
        return (
            array(v)
            if isinstance(v, np.ndarray)
            else b"](" + b"".join(text(x) if isinstance(x, bytes) else number(x) for x in v) + b"e"
        )

    return b"\x80\x02}(" + b"".join(text(k) + one(v) for k, v in content.items()) + b"u."


def made(tmp_path, served):
    "(source, files, server): a made data set under `tmp_path`, whole, and a server that has its archive"
    content = content_of(np.random.default_rng(0))
    members = {f"batches/{f}": f for f in content}
    packed = tar_gz(*((m, content[f]) for m, f in members.items()))
    server = served({"batches.tar.gz": packed})

    def part(begins):
        return {f: md5(c) for f, c in content.items() if f.startswith(begins)}

    source = sources.Source(
        "MNIST",
        "made",
        mnist_cifar.read_cifar,
        part("batch"),
        part("test"),
        (10, 4),
        (Archive((server.url("batches.tar.gz"),), md5(packed), members),),
        part("meta"),
    )
    (tmp_path / "made").mkdir()
    for f, c in content.items():
        (tmp_path / "made" / f).write_bytes(c)
    return source, content, server


@pytest.fixture
def whole(tmp_path, served, monkeypatch):  # noqa: F811
    source, _, server = made(tmp_path, served)
    from_files(monkeypatch, "MNIST", source)
    return source, server


def test_the_made_cifar_is_like_the_real_one(tmp_path, served):  # noqa: F811
    "Its pickles name what the real ones name, and Python reads them as we do"
    source, content, _ = made(tmp_path, served)
    ops = [
        (op.name, arg) for op, arg, _ in pickletools.genops(content["test"]) if op.name == "GLOBAL"
    ]
    assert [arg for _, arg in ops] == [
        "numpy.core.multiarray _reconstruct",
        "numpy ndarray",
        "numpy dtype",
    ]
    theirs = pickle.loads(content["test"], encoding="bytes")
    ours = source.read(source, tmp_path)
    assert torch.equal(ours["test_x"].reshape(4, -1), torch.from_numpy(theirs[b"data"]))
    assert ours["test_y"].tolist() == theirs[b"labels"]
    assert ours["class_names"] == tuple("0123456789")


def test_download_fails(whole, tmp_path):
    "What was wanted, what every server said, and what to do without a network; the damaged file stays"
    source, server = whole
    victim = next(iter(source.test))
    (tmp_path / "made" / victim).write_bytes(b"old")
    server.files.clear()
    with one_line(
        "MNIST is not complete in",
        str(tmp_path / "made"),
        "could not be downloaded",
        "HTTP 404",
        "--data",
    ):
        datasets.download("MNIST", tmp_path)
    assert (tmp_path / "made" / victim).read_bytes() == b"old"


# --- pickles


class Run:
    "Runs a function when it is unpickled"

    def __init__(self, *call):
        self.call = call

    def __reduce__(self):
        return self.call[0], self.call[1:]


def evil_pickles(mark):
    "Programs that would make the file `mark`, or reach for what could"
    yield pickle.dumps(Run(os.system, f"touch {mark}"), 2)
    yield pickle.dumps({b"data": Run(eval, f"open({str(mark)!r}, 'w')"), b"labels": [0]}, 4)
    yield b"\x80\x02cnumpy.core.multiarray\nscalar\n."
    yield b"\x80\x04\x8c\x05numpy\x8c\x0dndarray.ctypes\x93."
    yield b"\x80\x02"


def test_evil_pickles_whose_checksums_agree(tmp_path, served, monkeypatch):  # noqa: F811
    "Nothing is run, and each is one clear line"
    source, _, _ = made(tmp_path, served)
    for i, content in enumerate(evil_pickles(tmp_path / "mark")):
        (tmp_path / "made/test").write_bytes(content)
        from_files(monkeypatch, "MNIST", replace(source, test={"test": md5(content)}))
        with one_line(f"{tmp_path / 'made/test'} is refused: "):
            datasets.load("MNIST", data=tmp_path)
        assert not (tmp_path / "mark").exists(), i


def test_the_evil_pickles_are_evil(tmp_path):
    "Python's own reader runs the first of them"
    pickle.loads(next(evil_pickles(tmp_path / "mark")))
    assert (tmp_path / "mark").exists()


def test_download_delivers_the_wrong_bytes(whole, tmp_path):
    "The archive agrees with its sum, but not the file in it: the old file stays as it was, and nothing else is left"
    source, _ = whole
    victim = next(iter(source.test))
    wanted = replace(source, test={**source.test, victim: "0" * 32})
    (tmp_path / "made" / victim).write_bytes(b"old")
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    with pytest.raises(InputError, match=f"checksum of {victim}"):
        datasets._present(wanted, tmp_path)
    after = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    assert {p: c for p, c in after.items() if p.suffix != ".gz"} == before


@pytest.mark.parametrize("name", datasets.DATA_CARDS)
def test_every_data_set_is_one_card(name):
    "Its parts agree with each other, and whoever asks for one of them finds it there"
    card = datasets.DATA_CARDS[name]
    assert card.name == name
    assert card.source is None or card.source.name == name
    mean, std = card.statistics
    channels = card.shape[:1] or (1,)
    assert len(mean) == len(std)
    assert len(mean) in (0, *channels)
    assert card.network in network_names()
    assert card.classes > 1
    for paper, differs in card.recipes.items():
        recipe = datasets.recipe_for(paper, name)
        assert recipe.name == paper
        assert all(getattr(recipe, k) == v for k, v in differs.items())
    if card.source and card.source.class_names:
        assert len(card.source.class_names) == card.classes


@pytest.mark.parametrize("kind", [torch.int16, torch.int64, torch.float32])
def test_pixels_up_to_255_with_the_mean_of_pixels_up_to_1_are_refused(kind):
    x = torch.randint(0, 256, (30, 1, 8, 8), generator=torch.Generator().manual_seed(0)).to(kind)
    y = torch.arange(30) % 3
    parts = dict(train_x=x, train_y=y, test_x=x, test_y=y, class_names=("a", "b", "c"))
    recipe = transforms.Recipe("own", (0.1307,), (0.3081,))
    with one_line("recipe 'own' has a mean of 0.131, the training samples one of", "scale=255"):
        datasets.Dataset("d", **parts, recipe=recipe)
    datasets.Dataset("d", **parts, recipe=recipe, scale=255.0)


def test_a_reader_that_wants_an_argument_is_refused():
    with one_line("data set 'mine': expected a function without arguments to read it"):
        datasets.add_data_set("mine", lambda root: {})


def test_several_labels_a_sample_are_not_called_one_hot():
    x = torch.zeros(3, 4)
    many = torch.tensor([[1, 1, 0], [0, 1, 0], [1, 0, 1]])
    with one_line("several labels a sample cannot be learned here"):
        datasets.Dataset("d", x, many, x, many, ("a", "b", "c"), transforms.Recipe("own", (), ()))
    with one_line("one-hot rows become class numbers by y.argmax(1)"):
        one = torch.eye(3)
        datasets.Dataset("d", x, one, x, one, ("a", "b", "c"), transforms.Recipe("own", (), ()))
