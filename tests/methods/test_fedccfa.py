"FedCCFA's hook `find_clusters`: one override changes who shares, and nothing else; the page's stages are its switches"

import subprocess
import sys
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from fedrepro.core.errors import InputError
from fedrepro.core.trees import distance, same_bits, select, weighted_mean
from fedrepro.data import concept_drift, datasets, partition
from fedrepro.engine.federation import Federation
from fedrepro.engine.rounds import begin, next_round, run, sequential
from fedrepro.methods import fedccfa
from fedrepro.methods.fedccfa import BalancedHeads, FedCCFA, SharedHeads, cluster, madd
from fedrepro.methods.personal import server_head
from fedrepro.models import networks
from toy import ROOT

K = 6
LOCAL = dict(lr=0.05, epochs=1, batch_size=32)


def federation():
    digits = datasets.load("digits").first(480, 60)
    cut = partition.partition(
        "iid-class", digits.train_y.numpy(), digits.test_y.numpy(), clients=K, seed=0
    )
    net = networks.network("feddc_mlp", shape=(1, 8, 8))
    swaps = concept_drift.drift("sudden", clients=K, classes=10, at=1)
    return Federation(digits, net, cut, swaps, dtype=torch.float64)


class Given(FedCCFA, listed=False):
    "Clusters that a test names"

    groups = [0] * K

    def find_clusters(self, classifiers):
        return madd(classifiers), torch.tensor([self.groups] * classifiers.shape[0])


def heads(method, fed):
    "(the heads uploaded in the first round, those that the clients keep)"
    at = begin(method, fed)
    clients = [fed.client(k, 0, method.broadcast(at.server), at.states[k]) for k in range(K)]
    sent = [upload["head"] for upload, _, _ in sequential(method, clients)]
    return sent, [state["head"] for state in next_round(method, fed, at).states]


def test_an_override_decides_who_shares():
    fed = federation()
    sent, kept = heads(
        type("Pairs", (Given,), {"groups": [0, 0, 1, 1, 2, 2]}, listed=False)(**LOCAL), fed
    )
    for k in range(K):
        mate = k ^ 1
        mean = weighted_mean([sent[k], sent[mate]])
        assert distance(kept[k], mean) < 1e-12
        assert distance(sent[k], sent[mate]) > 1e-3
    sent, kept = heads(
        type("Alone", (Given,), {"groups": list(range(K))}, listed=False)(**LOCAL), fed
    )
    assert max(distance(a, b) for a, b in zip(sent, kept)) < 1e-12


def test_the_same_distance_and_clustering_is_the_same_method():
    class Again(FedCCFA, listed=False):
        def find_clusters(self, classifiers):
            distances = madd(classifiers)
            return distances, cluster(distances, self.eps)

    fed = federation()
    ours, theirs = (run(m(align_from=1, **LOCAL), fed, 3).snapshot for m in (FedCCFA, Again))
    assert same_bits(ours.server, theirs.server)
    assert same_bits(ours.states, theirs.states)


def test_the_hook_gets_classes_participants_and_numbers():
    shapes = []

    class Looks(FedCCFA, listed=False):
        def find_clusters(self, classifiers):
            shapes.append(tuple(classifiers.shape))
            return super().find_clusters(classifiers)

    fed = replace(federation(), participation=0.5)
    run(Looks(**LOCAL), fed, 1)
    assert shapes == [(10, 3, fed.net.feature_dim + 1)]


@pytest.mark.parametrize("shape", [(K,), (K, 10), (10, K, K)])
def test_clusters_of_another_shape_are_refused(shape):
    class Wrong(FedCCFA, listed=False):
        def find_clusters(self, classifiers):
            return madd(classifiers), torch.zeros(shape, dtype=torch.long)

    with pytest.raises(
        InputError, match=r"Wrong.find_clusters: clusters of shape .* expected .*10, 6"
    ):
        run(Wrong(**LOCAL), federation(), 1)


class FromServer(SharedHeads, listed=False):
    "The first stage, with first own heads from the server"

    init_client = server_head


@pytest.mark.parametrize(
    "stage, switches",
    [(FromServer, dict(clustering="own")), (BalancedHeads, {})],
)
def test_the_stages_are_switches(stage, switches):
    fed = federation()
    part = run(stage(**LOCAL), fed, 3).snapshot
    whole = run(FedCCFA(anchors="none", **switches, **LOCAL), fed, 3).snapshot
    assert same_bits(part.server, whole.server)
    for a, b in zip(part.states, whole.states):
        assert same_bits({n: b[n] for n in a}, a)


def test_without_balanced_heads_the_first_own_head_starts_from_the_servers_as_in_the_released_code():
    fed = federation()
    method = FedCCFA(clustering="own", head_epochs=0, **LOCAL)
    at = begin(method, fed)
    for k in range(K):
        client = fed.client(k, 0, method.broadcast(at.server), at.states[k])
        start = method.local_phases(client)[0].start(client, {})
        assert same_bits(select(start, "head."), select(fed.initial, "head."))


def test_common_anchors_are_the_newest_of_all_participants_for_everybody():
    fed = replace(federation(), participation=0.5)
    method = FedCCFA(anchors="common", align_from=1, **LOCAL)
    now = begin(method, fed)
    assert not now.server["anchors"].any()
    for _ in range(3):
        seen = []
        now = next_round(method, fed, now, lambda m, clients: watched(m, clients, seen))
        sent = torch.stack([upload["anchors"] for upload, _ in seen])
        counts = torch.stack([counts for _, counts in seen]) > 0
        for c in range(10):
            assert torch.allclose(now.server["anchors"][c], sent[counts[:, c], c].mean(0))
    newcomer = fed.client(0, 3, method.broadcast(now.server), begin(method, fed).states[0])
    assert same_bits({"a": method.known_anchors(newcomer)}, {"a": now.server["anchors"]})


def watched(method, clients, seen):
    "`sequential`, which keeps each upload and the client's counts in `seen`"
    clients = list(clients)
    answers = sequential(method, clients)
    for client, (upload, *_) in zip(clients, answers):
        seen.append((upload, client.counts))
    return answers


def test_every_step_of_the_class_is_exported():
    assert {"SharedHeads", "BalancedHeads", "Algorithm1", "FedCCFA"} <= {*fedccfa.__all__}


def test_the_oracle_gives_no_concept_to_outputs_that_no_class_has():
    "Ten classes, twelve outputs: the rows of the last two are shared by all, as before the drift everything is"
    wide = networks.network("feddc_mlp", classes=12, shape=(1, 8, 8))
    fed = replace(federation(), net=wide)
    sent, kept = heads(FedCCFA(clustering="oracle", **LOCAL), fed)
    mean = weighted_mean(sent)
    assert mean["head.weight"].shape[0] == 12
    assert max(distance(own, mean) for own in kept) < 1e-12
    drifted = run(FedCCFA(clustering="oracle", **LOCAL), fed, 2).snapshot.server
    assert drifted["concepts"].shape == (10, K)
    assert torch.equal(drifted["clusters"][:10], drifted["concepts"])
    assert not drifted["clusters"][10:].any()
    assert drifted["clusters"][:10].unique().numel() > 1


IMPORTS = """
import sys
from fedrepro.engine.method import load_methods
from fedrepro.engine.rounds import begin, next_round
from test_fedccfa import LOCAL, federation

for name, cls in load_methods().items():
    if cls.pooled:
        continue  # without drift alone
    method = cls(**LOCAL, **cls.check_settings)
    fed = federation()
    now = begin(method, fed)
    before = set(sys.modules)
    for _ in range(2):
        now = next_round(method, fed, now)
    print(name, *sorted(set(sys.modules) - before))
"""


def test_no_round_of_any_method_imports_a_library():
    "Table 12 counts the seconds of a round: the first one would have those of scikit-learn's import"
    folders = f"import sys; sys.path += [{str(ROOT / 'tests')!r}, {str(ROOT / 'tests/methods')!r}]"
    answer = subprocess.run(
        [sys.executable, "-c", folders + IMPORTS], capture_output=True, text=True, cwd=ROOT
    )
    assert answer.returncode == 0, answer.stderr
    imported = dict(line.split(maxsplit=1) for line in answer.stdout.splitlines() if " " in line)
    assert not imported


class Largest(TorchDispatchMode):
    "Remembers how many numbers the largest tensor has that is computed inside"

    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        answer = func(*args, **(kwargs or {}))
        if isinstance(answer, torch.Tensor):
            self.numbers = max(self.numbers, answer.numel())
        return answer


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("n", [3, 8, 33])
def test_madd_is_eq_4_for_all_triples_but_holds_one_row_at_a_time(n, dtype):
    "The same bits as one expression, which would take n^3 numbers: 5 GB for 500 participants and ten classes"
    vectors = torch.randn(2, n, 5, dtype=dtype, generator=torch.Generator().manual_seed(n))
    unit = F.normalize(vectors, dim=-1)
    cosines = unit @ unit.mT
    gaps = (cosines[:, :, None, :] - cosines[:, None, :, :]).abs()
    same = torch.eye(n, dtype=torch.bool)
    third = ~(same[:, None, :] | same[None, :, :])
    want = (gaps * third).sum(-1) / (n - 2) * ~same
    with Largest() as largest:
        distances = madd(vectors)
    assert torch.equal(distances, want)
    assert largest.numbers <= 2 * n * max(n, 5)
