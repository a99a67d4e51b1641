"Networks as people bring them, small: each is accepted and then trains like its own module, or it is refused in these words"

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
import numpy as np
import torch
import torch.nn.functional as F
import torchvision.models as vision
from torch import nn
from torch.nn.utils import parametrizations, spectral_norm, weight_norm
from torch.utils.checkpoint import checkpoint
from torchvision.models.convnext import CNBlockConfig
from torchvision.models.densenet import DenseNet
from torchvision.models.resnet import BasicBlock, Bottleneck
from torchvision.models.vgg import make_layers
from fedrepro.data.datasets import Dataset
from fedrepro.data.partition import Partition
from fedrepro.data.transforms import Recipe
from fedrepro.engine.federation import INIT, TRAIN, Federation
from fedrepro.models.architectures import ARCHITECTURES
from fedrepro.models.net import Network
from fedrepro.models.networks import network

CLASSES = 3
IMAGE = (1, 4, 4)
# of the plain loop and of FedAvg
SETTINGS = dict(lr=0.05, momentum=0.9, weight_decay=1e-3, epochs=2, batch_size=4)


@dataclass
class Bred:
    "One of the zoo"

    make: Callable[[], nn.Module]
    shape: tuple[int, ...] = IMAGE
    refused: str = ""  # what the refusal says; empty: it is accepted


ZOO: dict[str, Bred] = {}


def bred(make=None, **about):
    "Take a builder into the zoo under its name"
    if make is None:
        return partial(bred, **about)
    ZOO[make.__name__] = Bred(make, **about)
    return make


def federation(name: str, holdings=(6, 8)) -> Federation:
    "Clients with so many samples of images that suit the network; in float64"
    shape = ZOO[name].shape
    rng = np.random.default_rng(5)
    n = sum(holdings)

    def images(n):
        return torch.from_numpy(rng.integers(0, 256, (n, *shape), dtype=np.uint8)), torch.arange(
            n
        ) % CLASSES

    mean = (0.4,) * shape[0]
    data = Dataset(
        "zoo", *images(n), *images(6), tuple("abc"), Recipe("zoo", mean, (0.3,) * shape[0])
    )
    cut = Partition(tuple(np.split(np.arange(n), np.cumsum(holdings)[:-1])), None, "zoo")
    return Federation(data, made(name), cut, seed=3, dtype=torch.float64)


def made(name: str):
    ARCHITECTURES["zoo"] = lambda classes, shape: ZOO[name].make(), ZOO[name].shape
    try:
        return network("zoo", CLASSES, ZOO[name].shape)
    finally:
        del ARCHITECTURES["zoo"]


def flat(*layers, width=8, **head):
    "Flattened pixels, one linear layer of `width`, `layers`, a head"
    return Network(
        nn.Sequential(nn.Flatten(), nn.Linear(16, width), *layers),
        nn.Linear(width, CLASSES, **head),
    )


def convolved(*layers, channels=4, places=16, image=1):
    "One convolution, `layers`, a head"
    conv = nn.Conv2d(image, channels, 3, padding=1)
    return Network(
        nn.Sequential(conv, *layers, nn.ReLU(), nn.Flatten()), nn.Linear(channels * places, CLASSES)
    )


def takes(name, make, **about):
    ZOO[name] = Bred(make, **about)


# --- normalisation: with and without affine part, statistics, momentum

takes("batch norm", lambda: convolved(nn.BatchNorm2d(4)))
takes("batch norm, no affine part", lambda: convolved(nn.BatchNorm2d(4, affine=False)))
takes("batch norm, no statistics", lambda: convolved(nn.BatchNorm2d(4, track_running_stats=False)))
takes("batch norm, cumulative average", lambda: convolved(nn.BatchNorm2d(4, momentum=None)))
takes("batch norm of vectors", lambda: flat(nn.BatchNorm1d(8, momentum=0.3), nn.ReLU()))
takes(
    "batch norm of vectors, no statistics",
    lambda: flat(nn.BatchNorm1d(8, track_running_stats=False), nn.ReLU()),
)
takes("group norm", lambda: convolved(nn.GroupNorm(2, 4)))
takes("group norm, no affine part", lambda: convolved(nn.GroupNorm(2, 4, affine=False)))
takes("layer norm", lambda: flat(nn.LayerNorm(8)))
takes("layer norm, no affine part", lambda: flat(nn.LayerNorm(8, elementwise_affine=False)))
takes("root mean square norm", lambda: flat(nn.RMSNorm(8)))
takes("instance norm", lambda: convolved(nn.InstanceNorm2d(4)))
takes(
    "instance norm, affine, with statistics",
    lambda: convolved(nn.InstanceNorm2d(4, affine=True, track_running_stats=True)),
)
takes("local response norm", lambda: convolved(nn.LocalResponseNorm(2)))


# --- random numbers: dropout of every kind

takes("dropout", lambda: flat(nn.ReLU(), nn.Dropout(0.5)))
takes("dropout of channels", lambda: convolved(nn.Dropout2d(0.5)))
takes("alpha dropout", lambda: flat(nn.SELU(), nn.AlphaDropout(0.3)))
takes("feature alpha dropout", lambda: convolved(nn.FeatureAlphaDropout(0.3)))
takes("random leaky ReLU", lambda: flat(nn.RReLU()))
takes("batch norm and dropout", lambda: flat(nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5)))


class Noise(nn.Module):
    def forward(self, x):
        return x + torch.randn_like(x) if self.training else x


takes("noise on features", lambda: flat(Noise()))


# --- frozen, shared, computed parameters

takes("frozen body", lambda: Network(flat().body.requires_grad_(False), nn.Linear(8, CLASSES)))


@bred
def frozen_batch_norm():
    "Its weights stay, its statistics move, as in PyTorch"
    net = convolved(nn.BatchNorm2d(4))
    net.body[1].requires_grad_(False)
    return net


@bred
def one_frozen_bias():
    net = flat(nn.ReLU())
    net.head.bias.requires_grad_(False)
    return net


@bred
def tied_layers():
    net = flat(nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    net.body[5].weight = net.body[3].weight
    return net


@bred
def tied_and_transposed():
    "Encoder and decoder of one matrix"

    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.encode = nn.Linear(8, 8, bias=False)
            self.decode = nn.Linear(8, 8)
            self.decode.weight = self.encode.weight

        def forward(self, x):
            return F.linear(torch.relu(self.encode(x)), self.decode.weight.T, self.decode.bias)

    return flat(Both())


@bred
def one_layer_twice():
    layer = nn.Linear(8, 8)
    return flat(layer, nn.Tanh(), layer, nn.Tanh())


@bred
def shared_batch_norm():
    norm = nn.BatchNorm1d(8)
    return flat(norm, nn.ReLU(), nn.Linear(8, 8), norm)


takes("weight norm", lambda: flat(parametrizations.weight_norm(nn.Linear(8, 8)), nn.ReLU()))
takes("weight norm, older form", lambda: flat(weight_norm(nn.Linear(8, 8)), nn.ReLU()))
takes("spectral norm", lambda: flat(parametrizations.spectral_norm(nn.Linear(8, 8)), nn.ReLU()))
takes("spectral norm, older form", lambda: flat(spectral_norm(nn.Linear(8, 8)), nn.ReLU()))
takes("orthogonal matrix", lambda: flat(parametrizations.orthogonal(nn.Linear(8, 8)), nn.ReLU()))
takes("head without bias", lambda: flat(nn.ReLU(), bias=False))
takes("parametric ReLU", lambda: flat(nn.PReLU(8)))
takes("double parameters", lambda: flat(nn.ReLU()).double())
takes(
    "activations in place",
    lambda: convolved(
        nn.BatchNorm2d(4), nn.LeakyReLU(inplace=True), nn.Conv2d(4, 4, 1), nn.Hardtanh(inplace=True)
    ),
)


@lru_cache
def pretrained():
    return flat(nn.BatchNorm1d(8), nn.ReLU()).body


takes("one body for every call", lambda: Network(pretrained(), nn.Linear(8, CLASSES)))


@bred
def lazy_but_complete():
    body = nn.Sequential(nn.Flatten(), nn.LazyLinear(8), nn.LazyBatchNorm1d())
    body(torch.zeros(2, *IMAGE))
    return Network(body, nn.Linear(8, CLASSES))


# --- buffers of every kind


class Holds(nn.Module):
    "A module with one buffer, and a function of the input and the module"

    def __init__(self, buffer, use, **how):
        super().__init__()
        self.register_buffer("buffer", buffer, **how)
        self.use = use

    def forward(self, x):
        return self.use(self, x)


def holding(buffer, use, **how):
    return flat(nn.ReLU(), Holds(buffer, use, **how))


def masked(m, x):
    return x * m.buffer


takes("table of indices", lambda: holding(torch.arange(7, -1, -1), lambda m, x: x[:, m.buffer]))
takes("mask", lambda: holding(torch.arange(8) % 3 > 0, masked))
takes(
    "constant that is not saved", lambda: holding(torch.linspace(0, 1, 8), masked, persistent=False)
)
takes("saved constant", lambda: holding(torch.linspace(0, 1, 8), masked))
takes(
    "mask that moves itself",
    lambda: holding(
        torch.arange(8) % 3 > 0,
        lambda m, x: masked(setattr(m, "buffer", m.buffer.to(x.device)) or m, x),
    ),
)
takes("number as buffer", lambda: holding(torch.tensor(3), masked))
takes("empty buffer", lambda: holding(torch.zeros(0, 4), lambda m, x: x + m.buffer.sum()))
takes("no buffer yet", lambda: holding(None, lambda m, x: x))
takes(
    "complex filter",
    lambda: holding(
        torch.exp(1j * torch.arange(5.0)),
        lambda m, x: torch.fft.irfft(torch.fft.rfft(x) * m.buffer, 8),
    ),
)
takes("random projection", lambda: holding(torch.randn(8, 8), lambda m, x: x @ m.buffer))


def follows(m, x):
    "A statistic that is replaced by a new tensor"
    if m.training:
        m.buffer = 0.9 * m.buffer + 0.1 * x.mean(0).detach()
    return x - m.buffer


def counts_in_place(m, x):
    if m.training:
        m.buffer += x.detach().abs().mean()
    return x / (1 + m.buffer)


takes("statistic, replaced", lambda: holding(torch.zeros(8), follows))
takes("statistic, in place", lambda: holding(torch.zeros(()), counts_in_place))


def scales_and_follows(m, x):
    "Uses a statistic, and replaces it: the gradient needs the old one"
    y = x * m.buffer
    if m.training:
        m.buffer = 0.9 * m.buffer + 0.1 * x.detach().abs().mean(0)
    return y


def follows_data(m, x):
    if m.training:
        m.buffer.data = 0.9 * m.buffer.data + 0.1 * x.detach().mean(0)
    return x - m.buffer


takes("statistic, replaced after its use", lambda: holding(torch.ones(8), scales_and_follows))
takes("statistic, its data replaced", lambda: holding(torch.zeros(8), follows_data))


class Carries(nn.Module):
    "A recurrent cell that begins where the last batch ended, on average"

    def __init__(self):
        super().__init__()
        self.cell = nn.GRUCell(8, 8)
        self.register_buffer("state", torch.zeros(1, 8))

    def forward(self, x):
        h = self.cell(x, self.state.expand(len(x), 8))
        if self.training:
            self.state = h.detach().mean(0, keepdim=True)
        return h


takes("recurrent state in a buffer", lambda: flat(Carries()))


class OwnNorm(nn.BatchNorm1d):
    "Reads its count of batches, also with a momentum"

    def forward(self, x):
        return super().forward(x) / (1 + self.num_batches_tracked)


takes("batch norm that reads its count", lambda: flat(OwnNorm(8)))


# --- other layers


class Tokens(nn.Module):
    "The sixteen pixels as tokens 0..9"

    def forward(self, x):
        return (x.flatten(1) * 3).long().clamp(0, 9)


class Last(nn.Module):
    "The last step of a recurrent layer's output"

    def forward(self, x):
        return x[0][:, -1]


def words(*layers, width):
    return Network(
        nn.Sequential(Tokens(), nn.Embedding(10, 6, padding_idx=0), *layers),
        nn.Linear(width, CLASSES),
    )


class Attends(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)

    def forward(self, x):
        return self.attention(x, x, x)[0].mean(1)


class Mean(nn.Module):
    def forward(self, x):
        return x.mean(1)


class Named(nn.Module):
    "Layers and numbers in dicts and lists"

    def __init__(self):
        super().__init__()
        self.by_name = nn.ModuleDict({"one": nn.Linear(8, 8), "two": nn.Linear(8, 8)})
        self.in_order = nn.ModuleList([nn.Linear(8, 8)])
        self.scales = nn.ParameterList([torch.ones(8), torch.ones(8)])
        self.shifts = nn.ParameterDict({"up": torch.zeros(8)})

    def forward(self, x):
        x = (
            torch.relu(self.by_name["one"](x)) * self.scales[0]
            + self.by_name["two"](x) * self.scales[1]
        )
        return self.in_order[0](x) + self.shifts["up"]


class Unused(nn.Flatten):
    def __init__(self):
        super().__init__()
        self.other = nn.Linear(2, 2)


class Experts(nn.Module):
    "Each sample goes to the expert with its largest gate, so others may get no gradient"

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(8, 4)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x):
        weights, chosen = self.gate(x).softmax(1).max(1)
        y = torch.zeros_like(x)
        for k in chosen.unique():
            mine = chosen == k
            y[mine] = self.experts[k](x[mine])
        return weights[:, None] * y


takes("layer that is not used", lambda: flat(Unused()))
takes("mixture of experts, one for each sample", lambda: flat(Experts()))
takes("embedding", lambda: words(nn.Flatten(), width=96))
takes(
    "bag of embeddings",
    lambda: Network(nn.Sequential(Tokens(), nn.EmbeddingBag(10, 6)), nn.Linear(6, CLASSES)),
)
takes("LSTM", lambda: words(nn.LSTM(6, 5, batch_first=True), Last(), width=5))
takes(
    "GRU, two layers, both ways, dropout",
    lambda: words(
        nn.GRU(6, 4, 2, batch_first=True, bidirectional=True, dropout=0.3), Last(), width=8
    ),
)
takes("attention", lambda: words(Attends(), width=6))
takes(
    "transformer",
    lambda: words(nn.TransformerEncoderLayer(6, 2, 8, batch_first=True), Mean(), width=6),
)
takes("layers in dicts and lists", lambda: flat(Named()))
takes("nothing but a head", lambda: Network(nn.Flatten(), nn.Linear(16, CLASSES)))
takes(
    "transposed and grouped convolutions",
    lambda: convolved(nn.Conv2d(4, 4, 3, padding=1, groups=2), nn.ConvTranspose2d(4, 4, 1)),
)
takes(
    "bilinear layer",
    lambda: flat(
        type("Pair", (nn.Bilinear,), {"forward": lambda self, x: nn.Bilinear.forward(self, x, x)})(
            8, 8, 8
        )
    ),
)


# --- layers that the forward reaches by other ways


class Finishes(nn.Module):
    "A linear layer, and another layer inside a lambda"

    def __init__(self, layer):
        super().__init__()
        self.first = nn.Linear(16, 8)
        self.layer = layer
        self.finish = lambda x: torch.relu(self.layer(x))

    def forward(self, x):
        return self.finish(self.first(x.flatten(1)))


def finished(layer):
    return Network(Finishes(layer), nn.Linear(8, CLASSES))


takes("batch norm inside a lambda", lambda: finished(nn.BatchNorm1d(8)))
takes("layer norm inside a lambda", lambda: finished(nn.LayerNorm(8)))
takes("parametric ReLU inside a lambda", lambda: finished(nn.PReLU()))


@bred
def parameter_inside_a_lambda():
    class Scales(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(8))
            self.by_name = {"scaled": lambda x: x * self.scale}

        def forward(self, x):
            return self.by_name["scaled"](x)

    return flat(Scales())


@bred
def hook_that_keeps_a_layer():
    net = flat(nn.ReLU(), nn.LayerNorm(8))
    norm = net.body[3]
    net.body[1].register_forward_hook(lambda layer, given, made: norm(made))
    return net


@bred
def hook_on_gradients_of_a_layer():
    net = flat(nn.ReLU(), nn.Linear(8, 8))
    net.body[3].register_full_backward_hook(lambda layer, given, made: (given[0] * 0.5,))
    return net


class Remembers(nn.Module):
    "Keeps a constant from its first call on, and the features of its last"

    constant = None

    def forward(self, x):
        if self.constant is None:
            self.constant = torch.linspace(0, 1, 8).to(x)
        self.features = x
        return x + self.constant


takes("constant made in the first call", lambda: flat(Remembers()))


# --- torchvision, at small width

BIG = (3, 16, 16)


def without_head(net, name, width):
    setattr(net, name, nn.Identity())
    return Network(net, nn.Linear(width, CLASSES))


def vgg(**how):
    return nn.Sequential(
        make_layers([4, "M", 8, "M"], **how),
        nn.Flatten(),
        nn.Linear(128, 16),
        nn.ReLU(True),
        nn.Dropout(),
    )


class Narrow(vision.ResNet):
    "torchvision's ResNet with a sixteenth of its channels"

    def _make_layer(self, block, planes, *more, **how):
        return super()._make_layer(block, planes // 16, *more, **how)


takes("ResNet", lambda: without_head(Narrow(BasicBlock, [1, 1, 1, 1]), "fc", 32), shape=(3, 64, 64))
takes(
    "ResNet of bottlenecks",
    lambda: without_head(Narrow(Bottleneck, [1, 1, 1, 1]), "fc", 128),
    shape=(3, 64, 64),
)
takes("VGG", lambda: Network(vgg(batch_norm=False), nn.Linear(16, CLASSES)), shape=BIG)
takes(
    "VGG with batch norm", lambda: Network(vgg(batch_norm=True), nn.Linear(16, CLASSES)), shape=BIG
)
takes(
    "DenseNet",
    lambda: without_head(DenseNet(4, (2, 2), 8, 2, drop_rate=0.1), "classifier", 16),
    shape=BIG,
)
takes(
    "MobileNetV2",
    lambda: without_head(
        vision.MobileNetV2(inverted_residual_setting=[[1, 8, 1, 1], [2, 8, 1, 2]], dropout=0.2),
        "classifier",
        1280,
    ),
    shape=BIG,
)
takes(
    "MobileNetV3",
    lambda: without_head(
        vision.mobilenet_v3_small(width_mult=0.1, reduced_tail=True), "classifier", 48
    ),
    shape=(3, 32, 32),
)
takes(
    "ShuffleNet",
    lambda: without_head(vision.ShuffleNetV2([1, 1, 1], [8, 8, 16, 16, 24]), "fc", 24),
    shape=(3, 64, 64),
)
takes(
    "SqueezeNet",
    lambda: Network(
        nn.Sequential(*vision.squeezenet1_1().features[:4], nn.AdaptiveAvgPool2d(1), nn.Flatten()),
        nn.Linear(128, CLASSES),
    ),
    shape=(3, 32, 32),
)
takes(
    "EfficientNet block",
    lambda: Network(
        nn.Sequential(
            vision.efficientnet_b0(stochastic_depth_prob=0.2).features[:3],
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
        ),
        nn.Linear(24, CLASSES),
    ),
    shape=BIG,
)


@bred(shape=BIG)
def convnext():
    net = vision.ConvNeXt(
        [CNBlockConfig(8, 12, 1), CNBlockConfig(12, None, 1)], stochastic_depth_prob=0.2
    )
    net.classifier[2] = nn.Identity()
    return Network(net, nn.Linear(12, CLASSES))


@bred(shape=BIG)
def vision_transformer():
    return without_head(vision.VisionTransformer(16, 8, 1, 2, 8, 16, dropout=0.1), "heads", 8)


# --- refused


def refuses(name, words, make, **about):
    ZOO[name] = Bred(make, refused=words, **about)


refuses(
    "torchvision's ResNet as it is",
    "its builder gave a ResNet; expected a Network(body, head)",
    lambda: vision.ResNet(BasicBlock, [1, 1, 1, 1], num_classes=CLASSES),
    shape=(3, 32, 32),
)
refuses("nothing", "its builder gave a NoneType", lambda: None)
refuses(
    "head of two layers",
    "its head is a Sequential; expected an nn.Linear",
    lambda: Network(nn.Flatten(), nn.Sequential(nn.Linear(16, 8), nn.Linear(8, CLASSES))),
)
refuses(
    "head with weight norm",
    "its head is no plain nn.Linear but has bias, parametrizations",
    lambda: Network(nn.Flatten(), parametrizations.weight_norm(nn.Linear(16, CLASSES))),
)
refuses(
    "too few outputs",
    "its head has 2 outputs; expected one for each of 3 classes",
    lambda: Network(nn.Flatten(), nn.Linear(16, 2)),
)
refuses(
    "body that is not flat",
    "it makes (2, 4, 4, 3) of a batch of (2, 1, 4, 4); expected (2, 3)",
    lambda: Network(nn.Conv2d(1, 4, 3, padding=1), nn.Linear(4, CLASSES)),
)
refuses(
    "body of another width",
    "it cannot compute a batch of (2, 1, 4, 4): RuntimeError: mat1 and mat2 shapes cannot be multiplied",
    lambda: Network(nn.Flatten(), nn.Linear(15, CLASSES)),
)
refuses(
    "body that gives a tuple",
    "it cannot compute a batch of (2, 1, 4, 4): TypeError",
    lambda: words(nn.LSTM(6, 5, batch_first=True), width=5),
)
refuses(
    "lazy layers",
    "body.1.weight has no shape yet; expected layers with sizes",
    lambda: Network(nn.Sequential(nn.Flatten(), nn.LazyLinear(8)), nn.Linear(8, CLASSES)),
)
refuses(
    "everything frozen", "all of its parameters are frozen", lambda: flat().requires_grad_(False)
)
refuses(
    "half precision",
    "body.1.weight is torch.float16, but the run computes in torch.float64",
    lambda: flat().half(),
)
refuses(
    "random table",
    "the buffer body.3.buffer is drawn at random",
    lambda: holding(torch.randperm(8), lambda m, x: x[:, m.buffer]),
)
refuses(
    "random constant that is not saved",
    "the buffer body.3.buffer is drawn at random",
    lambda: holding(torch.rand(8), masked, persistent=False),
)
refuses(
    "sparse embedding",
    "body.1.weight has sparse gradients; expected sparse=False",
    lambda: Network(
        nn.Sequential(Tokens(), nn.Embedding(10, 2, sparse=True), nn.Flatten()),
        nn.Linear(32, CLASSES),
    ),
)
refuses(
    "embedding with a largest norm",
    "its forward changes body.1.weight in eval mode too",
    lambda: Network(
        nn.Sequential(Tokens(), nn.Embedding(10, 2, max_norm=0.1), nn.Flatten()),
        nn.Linear(32, CLASSES),
    ),
)
refuses(
    "input changed in place",
    "its first layer changes its input in place",
    lambda: Network(
        nn.Sequential(
            nn.LeakyReLU(0.5, inplace=True), nn.Hardtanh(-0.1, 0.1, inplace=True), nn.Flatten()
        ),
        nn.Linear(16, CLASSES),
    ),
)
refuses(
    "body that is not used",
    "its output depends on no parameter of its body; expected requires_grad=False",
    lambda: Network(Unused(), nn.Linear(16, CLASSES)),
)
refuses(
    "number that each forward changes",
    "the same batch, parameters and buffers give another output the second time",
    lambda: flat(Cools()),
)
refuses(
    "random numbers from a generator of its own",
    "the same batch, parameters and buffers give another output the second time",
    lambda: flat(OwnNoise()),
)
refuses(
    "number that goes into a statistic",
    "the same batch, parameters and buffers give another output the second time",
    lambda: holding(torch.zeros(8), averages),
)
refuses(
    "layers in a plain list",
    "it draws something at random when it is made that is no parameter and no buffer",
    lambda: flat(Listed()),
)
refuses(
    "random tensor that is no parameter",
    "it draws something at random when it is made that is no parameter and no buffer",
    lambda: flat(Projects()),
)
refuses(
    "squeezed output",
    "it makes (3,) of a batch of (1, 1, 4, 4); expected (1, 3)",
    lambda: flat(Squeezes()),
)
refuses(
    "statistics of the batch that need two samples",
    "it cannot compute a batch of (1, 1, 4, 4): ValueError: one sample has no spread",
    lambda: flat(Spread()),
)
refuses(
    "frozen layer's bias, complex weights",
    "body.2.w is torch.complex64; expected real parameters",
    lambda: flat(Turns()),
)
refuses(
    "statistic that evaluation moves",
    "its forward changes body.3.buffer in eval mode too",
    lambda: holding(torch.zeros(8), moves_always),
)
refuses(
    "whole counter",
    "its forward changes the buffer body.3.buffer, which is not saved or no float",
    lambda: holding(torch.tensor(0), counts),
)
refuses(
    "statistic that is not saved",
    "its forward changes the buffer body.3.buffer, which is not saved or no float",
    lambda: holding(torch.zeros(8), follows, persistent=False),
)
refuses(
    "statistic that grows",
    "it cannot compute a batch of (2, 1, 4, 4): RuntimeError",
    lambda: holding(torch.zeros(1, 8), grows),
)


class Cools(nn.Module):
    tau = 1.0

    def forward(self, x):
        self.tau *= 0.9
        return x * self.tau


class OwnNoise(nn.Module):
    def __init__(self):
        super().__init__()
        self.generator = torch.Generator().manual_seed(0)

    def forward(self, x):
        noise = torch.randn(x.shape, generator=self.generator)
        return x + noise if self.training else x


def averages(m, x):
    "A mean over all batches, whose number is no buffer"
    if m.training:
        m.seen = getattr(m, "seen", 0) + 1
        m.buffer += (x.detach().mean(0) - m.buffer) / m.seen
    return x if m.training else x - m.buffer


class Listed(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = [nn.Linear(8, 8).double()]

    def forward(self, x):
        return self.layers[0](x)


class Projects(nn.Module):
    def __init__(self):
        super().__init__()
        self.projection = torch.randn(8, 8)

    def forward(self, x):
        return x @ self.projection.to(x.dtype)


class Squeezes(nn.Module):
    def forward(self, x):
        return x.squeeze()


class Spread(nn.Module):
    def forward(self, x):
        if len(x) == 1:
            raise ValueError("one sample has no spread")
        return x


class Turns(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(8, dtype=torch.complex64))

    def forward(self, x):
        return (x * self.w).real


def moves_always(m, x):
    m.buffer = m.buffer + 1
    return x + m.buffer


def counts(m, x):
    m.buffer += 1
    return x / m.buffer


def grows(m, x):
    m.buffer = torch.cat([m.buffer, x.detach()])
    return x + m.buffer.mean(0)


@bred(
    refused="body.1.weight and head.weight are one parameter; expected none that body and head share"
)
def tied_with_the_head():
    net = Network(
        nn.Sequential(nn.Flatten(), nn.Linear(16, 3), nn.Linear(3, 16)), nn.Linear(16, CLASSES)
    )
    net.head.weight = net.body[1].weight
    return net


class Scaled(Network):
    def forward(self, x, features=False):
        return super().forward(x, features) * (1 if features else 10)


class WithScale(Network):
    def __init__(self, *parts):
        super().__init__(*parts)
        self.scale = nn.Parameter(torch.ones(()))


class Cosine(nn.Linear):
    def forward(self, x):
        return F.linear(F.normalize(x), F.normalize(self.weight))


refuses(
    "forward of one's own",
    "its output is not what its head makes of its body's",
    lambda: Scaled(nn.Flatten(), nn.Linear(16, CLASSES)),
)
refuses(
    "parameter beside body and head",
    "scale is outside of body and head",
    lambda: WithScale(nn.Flatten(), nn.Linear(16, CLASSES)),
)
refuses(
    "head that computes cosines",
    "its head is no plain nn.Linear",
    lambda: Network(nn.Flatten(), Cosine(16, CLASSES)),
)


# --- refused: what a model cannot take the place of, and what is kept beside it


class Keeps(nn.Module):
    "A parameter that a lambda keeps, or a list"

    def __init__(self, value, in_list=False):
        super().__init__()
        self.scale = scale = nn.Parameter(value)
        self.scales = [scale] if in_list else None
        self.scaled = lambda x: F.layer_norm(x, (8,), scale)

    def forward(self, x):
        return self.scaled(x) if self.scales is None else x * self.scales[0]


NOT_TRAINED = "is not trained as in a plain loop, where two steps of torch.optim.SGD lead elsewhere"
refuses(
    "parameter that a lambda keeps",
    f"body.3.scale {NOT_TRAINED}",
    lambda: flat(nn.ReLU(), Keeps(torch.ones(8))),
)
refuses(
    "random parameter that a lambda keeps",
    f"body.3.scale {NOT_TRAINED}",
    lambda: flat(nn.ReLU(), Keeps(torch.rand(8))),
)
refuses(
    "parameter in a plain list too",
    f"body.3.scale {NOT_TRAINED}",
    lambda: flat(nn.ReLU(), Keeps(torch.ones(8), in_list=True)),
)


@lru_cache
def pretrained_with_lambda():
    return Finishes(nn.LayerNorm(8))


@lru_cache
def pretrained_with_weight_norm():
    return weight_norm(nn.Linear(8, 8))


refuses(
    "one body with a lambda for every call",
    f"body.layer.weight {NOT_TRAINED}",
    lambda: Network(pretrained_with_lambda(), nn.Linear(8, CLASSES)),
)
refuses(
    "one layer with weight norm for every call",
    "its builder gives the same layers in every call, and they cannot be copied (RuntimeError)",
    lambda: flat(pretrained_with_weight_norm()),
)


@bred(refused="body.1.weight has a hook of its own")
def hook_on_gradients_of_a_parameter():
    net = flat(nn.ReLU())
    net.body[1].weight.register_hook(lambda gradient: gradient * 0.1)
    return net


def clamp_gradient(p):
    p.grad.clamp_(-0.01, 0.01)


@bred(refused="body.1.weight has a hook of its own")
def hook_on_accumulated_gradients():
    net = flat(nn.ReLU())
    net.body[1].weight.register_post_accumulate_grad_hook(clamp_gradient)
    return net


class Follows(nn.Module):
    "Adds a frozen layer that follows a trained one: `target.data = ...`"

    def __init__(self):
        super().__init__()
        self.online = nn.Linear(8, 8)
        self.target = nn.Linear(8, 8).requires_grad_(False)

    def forward(self, x):
        if self.training:
            for target, online in zip(self.target.parameters(), self.online.parameters()):
                target.data = 0.9 * target.data + 0.1 * online.data
        return self.online(x) + self.target(x)


refuses(
    "frozen layer that follows a trained one",
    "its forward changes body.2.target.weight in training, which is frozen",
    lambda: flat(Follows()),
)


class Warms(nn.Module):
    "Doubles its input after ten calls"

    n = 0

    def forward(self, x):
        if self.training:
            self.n += 1
        return x * (2 if self.n > 10 else 1)


class WarmsAll(Warms):
    "The same, but the class counts"

    def forward(self, x):
        WarmsAll.n += 1
        return x * (2 if self.n > 1000 else 1)


class First(nn.Module):
    "Shifts by the mean of the first batch"

    done = False

    def __init__(self):
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(8))

    def forward(self, x):
        if not self.done:
            self.shift.data.copy_(-x.detach().mean(0))
            self.done = True
        return x + self.shift


refuses(
    "counter with a later effect",
    "its forward changes body.2.n in training, an attribute that all clients share",
    lambda: flat(Warms()),
)
refuses(
    "counter on the class",
    "its forward changes body.2: WarmsAll.n in training, an attribute that all clients share",
    lambda: flat(WarmsAll()),
)
refuses(
    "flag after the first batch",
    "it keeps something of its first batch that is no parameter and no buffer",
    lambda: flat(First()),
)


@bred(refused="its forward changes steps around hook_that_counts.<locals>.warm['n'] in training")
def hook_that_counts():
    net = flat(nn.ReLU())
    steps = {"n": 0}

    def warm(layer, given, made):
        steps["n"] += 1
        return made * (2 if steps["n"] > 1000 else 1)

    net.body.register_forward_hook(warm)
    return net


CALLS = 0


def count_calls():
    global CALLS
    CALLS += 1
    return CALLS


class CountsInAGlobal(nn.Module):
    def forward(self, x):
        return x * (2 if count_calls() > 1000 else 1)


refuses(
    "counter in a global",
    "its forward changes the global CALLS in training, which all clients share",
    lambda: flat(CountsInAGlobal()),
)
collected: list[torch.Tensor] = []


@bred
def hook_that_collects():
    "For a picture, say: what it keeps changes nothing"
    net = flat(nn.ReLU())
    net.body.register_forward_hook(lambda layer, given, made: collected.append(made.detach()))
    return net


def drawn(low, high) -> int:
    return int(torch.randint(low, high, ()))


AT_RANDOM = "its builder draws its layers at random"
refuses(
    "random number of layers",
    AT_RANDOM,
    lambda: flat(*[nn.Linear(8, 8) for _ in range(drawn(0, 9))]),
)
refuses("random width", f"{AT_RANDOM}, body.1.weight", lambda: flat(width=drawn(2, 999)))


class Pair(Network):
    def forward(self, x, features=False):
        z = self.body(x)
        return z if features else (self.head(z), z)


refuses(
    "two outputs",
    "its forward returns a tuple; expected a tensor (2, 3), the class scores",
    lambda: Pair(nn.Flatten(), nn.Linear(16, CLASSES)),
)


class Again(nn.Module):
    "Activation checkpointing"

    def __init__(self, reentrant):
        super().__init__()
        self.first = nn.Linear(16, 8)
        self.second = nn.Linear(8, 8)
        self.reentrant = reentrant

    def forward(self, x):
        return checkpoint(self.second, self.first(x.flatten(1)), use_reentrant=self.reentrant)


CHECKPOINTED = "it computes layers again in the backward pass (torch.utils.checkpoint)"
refuses(
    "activation checkpointing",
    CHECKPOINTED,
    lambda: Network(Again(False), nn.Linear(8, CLASSES)),
)
refuses(
    "activation checkpointing, reentrant",
    CHECKPOINTED,
    lambda: Network(Again(True), nn.Linear(8, CLASSES)),
)


@bred(refused="body is compiled by torch.jit, which keeps its tensors; expected the module itself")
def compiled_body():
    net = flat(nn.ReLU())
    return Network(torch.jit.trace(net.body, torch.zeros(1, *IMAGE)), net.head)


@bred(refused="1 of 3 initial numbers of head.bias are nan; expected finite numbers")
def initial_bias_that_is_no_number():
    net = flat(nn.ReLU())
    net.head.bias.data[1] = torch.nan
    return net


class Logarithm(nn.Module):
    def forward(self, x):
        return torch.log(-x.abs())


refuses(
    "output that is no number",
    "with its initial parameters its scores of a training sample are [nan, nan, nan]",
    lambda: flat(Logarithm()),
)


# --- what a network must equal


def fresh(name: str, seed: int = 0) -> nn.Module:
    "The module of a network, in float64, as `seed` starts it"
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return ZOO[name].make().double()


def plain_loop(name: str, fed: Federation, rounds: int) -> dict:
    "FedAvg over copies of the module: torch.optim.SGD, and the mean of what a state_dict holds"
    start = int(np.random.default_rng([fed.seed, INIT, 0]).integers(2**62))
    server = {n: t.clone() for n, t in fresh(name, start).state_dict().items()}
    sizes = [len(rows) for rows in fed.partition.train]
    for t in range(rounds):
        models = [plain_client(fresh(name), server, fed, t, k) for k in range(fed.clients)]
        server = {n: mean_of([m[n] for m in models], sizes) for n in server}
    return server


def mean_of(tensors: list, sizes: list):
    "Floats by size; other tensors, which all clients changed alike, as they are"
    if tensors[0].is_floating_point():
        return sum(t * (n / sum(sizes)) for t, n in zip(tensors, sizes))
    assert all(torch.equal(t, tensors[0]) for t in tensors)
    return tensors[0]


def plain_client(module, server: dict, fed: Federation, t: int, k: int) -> dict:
    "One client's state_dict after training in round t"
    module.load_state_dict(server)
    rows = fed.partition.train[k]
    seeds = fed.noise(TRAIN, t, k)
    order = np.random.default_rng([fed.seed, TRAIN, t, k])
    s = {n: v for n, v in SETTINGS.items() if n in ("lr", "momentum", "weight_decay")}
    optimiser = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], **s)
    seeds.integers(2**62)  # that of what comes before the training
    batches = [
        rows[some]
        for _ in range(SETTINGS["epochs"])
        for some in np.split(order.permutation(len(rows)), [4])
    ]
    with torch.random.fork_rng():
        torch.manual_seed(int(seeds.integers(2**62)))
        module.train()
        for batch in batches:
            x = fed.data.batch(fed.data.train_x[batch], None, torch.float64)
            optimiser.zero_grad()
            F.cross_entropy(module(x), fed.data.train_y[batch]).backward()
            optimiser.step()
    return {n: v.detach().clone() for n, v in module.state_dict().items()}
