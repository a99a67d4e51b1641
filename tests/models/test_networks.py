"""What people get wrong when they ask for a network, and what every network has to keep."""

import numpy as np
import pytest
import torch
from torch import nn
from fedrepro.core.errors import InputError
from fedrepro.core.trees import same_bits
from fedrepro.models.architectures import ARCHITECTURES, architecture
from fedrepro.models.net import Net, Network
from fedrepro.models.networks import network, network_names


@pytest.mark.parametrize(
    "wrong, said",
    [
        (
            dict(name="LeNet"),
            "network 'LeNet' is unknown; did you mean 'feddc_lenet'? accepted: digits_cnn",
        ),
        (
            dict(name="fedccfa_fmnist", shape=(1, 8, 8)),
            "network fedccfa_fmnist: images of 1x8x8 are too small",
        ),
        (
            dict(name="resnet18", shape=(64, 64)),
            "network resnet18 needs a shape (channels, height, width), got (64, 64)",
        ),
        (dict(name="dta_cnn", shape=(64, 20000)), "network dta_cnn: it needs a shape"),
        (
            dict(name="resnet18", shape=(100, 40, 1000, 24)),
            "network resnet18 needs a shape (channels, height, width)",
        ),
        (dict(name="feddc_linear", shape=(64, 20000)), "network feddc_linear is not for texts"),
        (
            dict(name="feddc_mlp", classes=0),
            "network feddc_mlp: classes: expected a whole number of at least 1, got 0",
        ),
    ],
)
def test_impossible_networks(wrong, said):
    with pytest.raises(InputError) as e:
        network(**wrong)
    assert str(e.value).startswith(said)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("name", network_names())
def test_names_and_order(name):
    "Every name says body or head; the tree is in the module's order; the head is last and linear"
    net = network(name, classes=3)
    tree = net.init(0)
    assert all(n.startswith(("body.", "head.")) for n in tree)
    assert list(tree)[-2:] == [
        "head.weight",
        "head.bias",
    ]
    assert [n for n in tree if n in net.trained] == list(net.trained)
    assert tree["head.weight"].shape == (3, net.feature_dim)
    assert net.classes == 3
    assert (
        net.count()
        == net.count("body.") + net.count("head.")
        == sum(tree[n].numel() for n in net.trained)
    )


@pytest.mark.parametrize(
    "name", ["resnet18_cifar", "feddc_resnet18", "resnet50_cifar", "resnet50", "resnet18"]
)
def test_large_networks_as_functions(name):
    net = network(name)
    x = torch.randn(2, *ARCHITECTURES[name][1], generator=torch.Generator().manual_seed(0))
    tree = net.init(0)
    expected = net.new_module(0).eval()(x)
    assert torch.equal(net(tree, x), expected)
    assert torch.equal(net.classify(tree, net.features(tree, x)), expected)


def test_modes_do_not_leak():
    "A training call between two evaluating ones of another model changes nothing for them"
    net = network("resnet18_cifar", shape=(3, 8, 8))
    a = net.init(0)
    b = net.init(1)
    x = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    before = net(a, x)
    net(b, x, train=True)
    assert same_bits(before, net(a, x))
    assert same_bits(a, net.init(0))
    assert not same_bits(b, net.init(1))


# --- how many parameters: counted by hand


def conv(i, o, k):
    return i * o * k * k


def linear(i, o):
    return i * o + o


def normed(*convs):
    return sum(conv(*c) + 2 * c[1] for c in convs)  # no bias; the norm's weight and bias


def resnet(stem, block, out):
    "All but the classifier: the stem, then 2, 2, 2, 2 blocks of two convolutions, or 3, 4, 6, 3 of three"
    total = normed((3, 64, stem))
    i = 64
    for width, blocks in zip((64, 128, 256, 512), {2: (2, 2, 2, 2), 3: (3, 4, 6, 3)}[block]):
        o = width * out
        for b in range(blocks):
            total += (
                normed((i, width, 3), (width, o, 3))
                if block == 2
                else normed((i, width, 1), (width, width, 3), (width, o, 1))
            )
            if b == 0 and i != o:
                total += normed((i, o, 1))
            i = o
    return total


def fedbss(side):
    "FedBSS's small network, whose last map has `side` times `side` pixels"
    convolutions = conv(1, 32, 5) + 32 + conv(32, 64, 5) + 64
    return convolutions + linear(side * side * 64, 512) + linear(512, 10)


COUNTS = {  # networks whose papers print a rounded number; the others' exact ones are on the page
    "fedbss_cnn": fedbss(7),
    "fedbss_cnn_stride3": fedbss(3),
    "fedbss_cnn_unpadded": fedbss(1),
    "resnet18": resnet(7, 2, 1) + linear(512, 10),
    "feddc_resnet18": resnet(7, 2, 1) + linear(512, 10),
    "fedadc_resnet18": resnet(3, 2, 1) + linear(512, 10),
    "resnet50": resnet(7, 3, 4) + linear(2048, 10),
    "resnet18_cifar": resnet(3, 2, 1) + linear(512, 512) + linear(512, 256) + linear(256, 10),
}


@pytest.mark.parametrize("name", COUNTS)
def test_every_parameter_is_accounted_for(name):
    assert network(name).count() == COUNTS[name]


def test_what_moon_compares_is_the_projection():
    "FedADC's networks for MOON differ from the others' in what stands before the head alone"
    for name, plain, last in (
        ("fedadc_moon_cnn", "fedadc_cnn", 256),
        ("fedadc_moon_resnet18", "fedadc_resnet18", 512),
    ):
        moon = network(name)
        other = network(plain)
        assert moon.feature_dim == 256
        assert moon.count("body.header") == linear(last, last) + linear(last, 256)
        assert not other.count("body.header")
        convolutions = [n for n, t in other.init(0).items() if t.ndim == 4]
        assert convolutions
        assert [n for n, t in moon.init(0).items() if t.ndim == 4] == convolutions
        x = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
        z = moon.features(moon.init(0), x)
        assert z.shape == (2, 256) and (z < 0).any(), "no activation after the projection"


def test_a_builder_with_other_arguments_is_refused():
    with pytest.raises(InputError, match=r"expected a function of \(classes, shape\)"):
        architecture(1, 8, 8)(lambda num_classes=10: None)


def test_a_forward_without_features_is_refused():
    class Own(Network):
        def forward(self, x):
            return self.head(self.body(x))

    with pytest.raises(InputError, match=r"expected forward\(self, x, features=False\)"):
        Net("own", lambda: Own(nn.Flatten(), nn.Linear(64, 3)))


def test_a_builder_whose_seed_does_not_decide_is_refused():
    def build():
        net = Network(nn.Sequential(nn.Flatten(), nn.Linear(4, 3)), nn.Linear(3, 2))
        nn.init.constant_(net.body[1].weight, np.random.default_rng().normal())
        return net

    with pytest.raises(InputError, match="body.1.weight differs between two networks of one seed"):
        Net("own", build)


@pytest.mark.parametrize("usual", [torch.float64, torch.bfloat16])
def test_the_callers_default_type_is_no_part_of_a_model(usual):
    "First weights are drawn in float32, also by a script that has set another type"
    right = network("digits_cnn").init(3)
    torch.set_default_dtype(usual)
    try:
        found = network("digits_cnn").init(3)
        assert torch.get_default_dtype() is usual
    finally:
        torch.set_default_dtype(torch.float32)
    assert same_bits(found, right)


def test_a_type_that_cannot_be_is_named_once():
    net = Net("own", lambda: Network(nn.Flatten(), nn.Linear(4, 2).half()))
    with pytest.raises(InputError, match="computes in torch.float32; expected torch.float32$"):
        net.init(0)
