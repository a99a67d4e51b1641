"""The sets that are read out of their archives, on small made archives of the same formats: the right pixels, labels and order,
and one clear line for whatever is wrong."""

import gzip
import io
import random
import zipfile
from dataclasses import replace

import numpy as np
import pytest
import torch
import torchvision
from PIL import Image
from torchvision.io import encode_jpeg, encode_png

from fedrepro.core.errors import InputError
from fedrepro.data import datasets, images
from fedrepro.data.images import DOMAINS, picture
from fedrepro.data.partition import partition
from fedrepro.data.sources import complete
from fedrepro.data.datasets import recipe_for
from fedrepro.data.transforms import pixel_statistics
from test_download import md5, names, tar_gz
from toy import from_files, one_line

ARCHIVED = [s.name for s in images.PICTURES]


# --- made archives


def random_picture(r, height, width, channels=3):
    return torch.from_numpy(r.integers(0, 256, (channels, height, width), np.uint8))


def png(x):
    return bytes(encode_png(x).numpy())


def jpg(x):
    return bytes(encode_jpeg(x, 95).numpy())


def idx(a):
    return bytes([0, 0, 8, a.ndim]) + np.array(a.shape, ">u4").tobytes() + a.tobytes()


def zipped(files):
    with zipfile.ZipFile(raw := io.BytesIO(), "w") as packed:
        for name, content in files.items():
            packed.writestr(zipfile.ZipInfo(name), content)  # no time: made twice it is the same
    return raw.getvalue()


def shuffled(files, r):
    keys = list(files)
    return {keys[i]: files[keys[i]] for i in r.permutation(len(keys))}


def made_cinic(r):
    "Three pictures of each class in each part, in any order, some grey"
    classes = datasets.DATA_CARDS["CINIC-10"].source.class_names
    files = {
        f"{part}/{name}/{kind}-{n}.png": png(random_picture(r, 32, 32, 1 if n == 10 else 3))
        for part in ("train", "valid", "test")
        for name in classes
        for kind, n in (("cifar", 2), ("n021", 10), ("n021", 9))
    }
    return (
        {"CINIC-10.tar.gz": tar_gz(*shuffled(files, r).items(), ("./README", b"text"))},
        (30, 30),
        files,
    )


def made_letters(r):
    parts = {
        part: (
            r.integers(0, 256, (n, 28, 28), np.uint8),
            r.permutation(np.resize(np.arange(1, 27), n)).astype(np.uint8),
        )
        for part, n in (("train", 78), ("test", 52))
    }
    files = {
        f"gzip/emnist-letters-{part}-{kind}-ubyte.gz": gzip.compress(idx(a), mtime=0)
        for part, pair in parts.items()
        for kind, a in zip(("images-idx3", "labels-idx1"), pair)
    }
    return {
        "gzip.zip": zipped(files | {"gzip/emnist-digits-train-labels-idx1-ubyte.gz": b"not read"})
    }, parts


def made_tiny(r):
    "Three classes whose words are in another order than their numbers"
    ids = ["n03", "n01", "n02"]
    top = "tiny-imagenet-200"
    pictures = {
        f"{top}/train/{w}/images/{w}_{n}.JPEG": jpg(random_picture(r, 64, 64, 1 if n == 2 else 3))
        for w in ids
        for n in (10, 2)
    }
    pictures |= {f"{top}/val/images/val_{n}.JPEG": jpg(random_picture(r, 64, 64)) for n in range(6)}
    lists = {
        f"{top}/wnids.txt": "\n".join(ids).encode(),
        f"{top}/words.txt": b"n01\tfish, a\nn02\tcat\nn03\tdog, b\nn04\tno",
        f"{top}/val/val_annotations.txt": "".join(
            f"val_{n}.JPEG\t{ids[n % 3]}\t0\t0\t1\t1\n" for n in range(6)
        ).encode(),
        f"{top}/test/images/test_0.JPEG": b"not read",
        f"{top}/train/n01/n01_boxes.txt": b"",
    }
    return {"tiny-imagenet-200.zip": zipped(shuffled(pictures | lists, r))}, (6, 6), pictures


def made_domains(r, per_class=2):
    "Training files 0 to per_class - 1 of three classes and a strange one, one for testing; the pictures of any size"
    files = {}
    pictures = {}
    for d in DOMAINS:
        listed = {
            part: [
                f"{d}/{name}/{d}_{n}.jpg"
                for name in ("pizza", "zebra", "axe", "bird")
                for n in numbers
            ]
            for part, numbers in (("train", range(per_class)), ("test", [99]))
        }
        mine = {
            f: jpg(random_picture(r, *r.integers(20, 90, 2)))
            for part in listed.values()
            for f in part
        }
        pictures |= mine
        files |= {
            f"{d}.zip": zipped(mine),
            **{
                f"{d}_{part}.txt": "".join(f"{f} 3\n" for f in fs).encode()
                for part, fs in listed.items()
            },
        }
    return files, (0, 0), pictures


def placed(name, files, root, sizes):
    "The source `name` for these `files` in place of the published ones, written under `root`"
    source = datasets.DATA_CARDS[name].source
    (root / source.folder).mkdir(parents=True, exist_ok=True)
    for f, content in files.items():
        (root / source.folder / f).write_bytes(content)
    return replace(source, train={f: md5(c) for f, c in files.items()}, sizes=sizes)


def made(name, root, r=None):
    "A made source of each kind, placed under `root`"
    r = r or np.random.default_rng(0)
    if name.startswith("EMNIST"):
        return placed(
            name, made_letters(r)[0], root, (78, 52) if name == "EMNIST-letters" else (30, 20)
        )
    files, sizes, _ = {
        "CINIC-10": made_cinic,
        "Tiny-ImageNet": made_tiny,
        "DomainNet": made_domains,
    }[name](r)
    return placed(name, files, root, sizes)


@pytest.fixture
def rng():
    return np.random.default_rng(7)


# --- what is read


def test_a_picture_of_any_kind(rng):
    x = random_picture(rng, 9, 9)
    assert np.array_equal(picture(png(x), 9), x)
    assert np.array_equal(picture(png(x[:1]), 9), x[:1].expand(3, 9, 9))
    alpha = torch.cat([x, torch.full((1, 9, 9), 5, dtype=torch.uint8)])
    with io.BytesIO() as raw:
        Image.fromarray(alpha.permute(1, 2, 0).numpy(), "RGBA").save(raw, "png")
        assert np.array_equal(picture(raw.getvalue(), 9), x)
    wide = random_picture(rng, 128, 192)
    pil = Image.fromarray(wide.permute(1, 2, 0).numpy()).resize((64, 64), Image.Resampling.BILINEAR)
    assert (
        np.abs(
            picture(png(wide), 64).transpose(1, 2, 0).astype(int) - np.asarray(pil).astype(int)
        ).max()
        <= 1
    )
    # brighter downwards, not to the right
    ramp = torch.arange(64, dtype=torch.uint8).mul(2)[None, :, None].expand(3, 64, 32)
    small = picture(png(ramp), 16)
    assert (np.diff(small[0, :, 3].astype(int)) > 0).all()
    assert np.ptp(small[0], axis=1).max() == 0


def test_cinic_is_imagefolders(tmp_path, rng):
    files, sizes, pictures = made_cinic(rng)
    for name, content in pictures.items():
        (tmp_path / "open" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "open" / name).write_bytes(content)
    source = placed("CINIC-10", files, tmp_path, sizes)
    parts = source.read(source, tmp_path)
    for part in ("train", "test"):
        theirs = torchvision.datasets.ImageFolder(tmp_path / "open" / part)
        assert tuple(theirs.classes) == parts["class_names"]
        assert theirs.targets == parts[f"{part}_y"].tolist()
        assert all(
            np.array_equal(np.asarray(x).transpose(2, 0, 1), ours)
            for (x, _), ours in zip(theirs, parts[f"{part}_x"])
        )
    assert parts.keys() == {"train_x", "train_y", "test_x", "test_y", "class_names"}, (
        "the validation set is left out"
    )


def test_a_domain_is_a_client(tmp_path, rng, monkeypatch):
    from_files(monkeypatch, "DomainNet", made("DomainNet", tmp_path, rng))
    d = datasets.load("DomainNet", tmp_path, "FedBSS")
    cut = partition(
        "natural",
        d.train_y.numpy(),
        d.test_y.numpy(),
        clients=6,
        classes=d.classes,
        groups=d.groups,
    )
    assert [d.train_groups[mine].unique().tolist() for mine in cut.train] == [[k] for k in range(6)]
    assert cut.sizes.tolist() == [6] * 6
    assert d.shape == (3, 64, 64)
    assert d.classes == 10
    few = d.first(18, 12)  # a shortened set has all domains and classes
    assert np.bincount(few.groups[0]).tolist() == [3] * 6
    assert len(few.train_x) == 18
    assert set(few.train_y.tolist()) == set(d.train_y.tolist())
    assert np.array_equal(few.groups[1], d.groups[1][:12])
    assert d.first(None, None) is d
    with pytest.raises(InputError, match="train_samples 37: DomainNet has 36"):
        d.first(37, None)
    with pytest.raises(InputError, match="test_samples 99: DomainNet has 18"):
        d.first(None, 99)
    moved = replace(d, train_groups=d.train_groups.flip(0))
    assert len({d.fingerprint, moved.fingerprint, replace(d, train_groups=None).fingerprint}) == 3


# --- statistics


def test_statistics_that_nobody_published_are_measured(tmp_path, monkeypatch):
    for name in ("EMNIST-letters-10", "Tiny-ImageNet", "DomainNet"):
        from_files(monkeypatch, name, made(name, tmp_path))
        d = datasets.load(name, tmp_path, "FedDC")
        x = d.train_x.double() / 255
        assert np.allclose(d.recipe.mean, x.mean((0, 2, 3)), rtol=1e-12)
        assert np.allclose(d.recipe.std, x.std((0, 2, 3), correction=0), rtol=1e-12)
        z = d.batch(d.train_x, None, torch.float64)
        assert z.mean((0, 2, 3)).abs().max() < 1e-9
        assert (z.std((0, 2, 3), correction=0) - 1).abs().max() < 1e-9
    own = replace(recipe_for("plain", "MNIST"), name="own")
    assert datasets.load("EMNIST-letters-10", tmp_path, own).recipe == own


def test_measuring_in_pieces():
    x = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (2050, 1, 3, 2), np.uint8))
    assert np.isclose(
        pixel_statistics(x, 16.0)["std"][0], (x.double() / 16).std(correction=0), rtol=1e-12
    )
    assert pixel_statistics(torch.full((3, 2, 2, 2), 51, dtype=torch.uint8)) == {
        "mean": (0.2, 0.2),
        "std": (0.0, 0.0),
    }


def test_recipes_of_cinic():
    ccfa, lfd = (recipe_for(p, "CINIC-10") for p in ("FedCCFA", "LfD"))
    assert (
        ccfa.mean
        == lfd.mean
        == (
            0.47889522,
            0.47227842,
            0.43047404,
        )
    )
    assert ccfa.std == lfd.std == (0.24205776, 0.23828046, 0.25874835)
    assert (ccfa.crop, ccfa.flip, ccfa.pad, lfd.crop, lfd.flip, lfd.pad) == (
        4,
        True,
        "black",
        4,
        True,
        "reflect",
    )


# --- packs


def counted(monkeypatch):
    "Counts the pictures that are decoded"
    calls = []
    before = images.picture
    monkeypatch.setattr(
        images, "picture", lambda content, size: (calls.append(size), before(content, size))[1]
    )
    return calls


@pytest.mark.parametrize("name", ARCHIVED)
def test_a_pack_stands_for_the_archives(name, tmp_path, monkeypatch):
    calls = counted(monkeypatch)
    source = made(name, tmp_path)
    before = source.read(source, tmp_path)
    n = len(calls)
    for f in source.files:
        (tmp_path / source.folder / f).unlink()
    complete(source, tmp_path)
    assert names(tmp_path / source.folder) == [source.pack]
    assert source.present(tmp_path)
    after = source.read(source, tmp_path)
    assert len(calls) == n
    assert before.keys() == after.keys()
    for k, v in before.items():
        assert torch.equal(v, after[k]) if torch.is_tensor(v) else v == after[k]
    from_files(monkeypatch, name, source)
    assert datasets.download(name, tmp_path) == tmp_path / source.folder  # nobody is asked


def test_damaged_pixels_of_a_pack_are_found(tmp_path):
    "Decoded again where the archive is there, refused where it is not"
    source = made("CINIC-10", tmp_path)
    before = source.read(source, tmp_path)
    archive = tmp_path / source.folder / "CINIC-10.tar.gz"
    pack = tmp_path / source.folder / source.pack
    content = pack.read_bytes()
    kept = archive.read_bytes()
    pixels = before["train_x"].numpy().tobytes()
    r = random.Random(3)
    archive.unlink()
    for _ in range(5):
        wrong = bytearray(content)
        wrong[content.index(pixels) + r.randrange(len(pixels))] ^= r.randrange(1, 256)
        pack.write_bytes(wrong)
        with one_line("missing: CINIC-10.tar.gz"):
            source.read(source, tmp_path)
    archive.write_bytes(kept)
    assert torch.equal(source.read(source, tmp_path)["train_x"], before["train_x"])
    assert pack.read_bytes()[:1000] == content[:1000]


# --- what is wrong


@pytest.mark.parametrize("name", ARCHIVED)
def test_damaged_archives_are_not_opened(name, tmp_path, monkeypatch):
    calls = counted(monkeypatch)
    source = made(name, tmp_path)
    path = tmp_path / source.folder / next(iter(source.files))
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with one_line(
        str(path), "is damaged: its MD5 is", source.files[path.name], f"`fedrepro data {name}`"
    ):
        source.read(source, tmp_path)
    assert calls == []
