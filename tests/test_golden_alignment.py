"""FedFM, FedPAC and IFCA, step by step against the numbers of FedCCFA's released code."""
import torch
from fedrepro.methods.alignment import FedFM, FedPAC
from fedrepro.methods.clustered import IFCA
from test_golden import CONFIG, GOLDEN, TOLERANCE, check, close, tree

def args(name): return GOLDEN["methods"][name]["args"]

def sgd(a): return dict(momentum=a["momentum"], weight_decay=a["weight_decay"], batch_size=0)

def same(ours, stored, what, tolerance=TOLERANCE):
    want = torch.tensor(stored, dtype=torch.float64)
    assert ours.shape == want.shape and (gap := float((ours - want).abs().max())) < tolerance, f"{what}: off by {gap}"

def test_every_round_of_fedfm_equals_the_released_code():
    a = args("FedFM")
    m = FedFM(lr=a["lr"], epochs=a["epochs"], weight=a["lambda"], tau=a["temperature"],
              align_from=CONFIG["align_round"], **sgd(a))
    check(m, "FedFM", lambda now, want, seen, t: same(now.server["anchors"], want["anchors"], f"round {t}, anchors"))

def test_every_round_of_fedpac_equals_the_released_code():
    a = args("FedPAC")
    m = FedPAC(lr=a["rep_lr"], epochs=a["rep_epochs"], head_lr=a["clf_lr"], head_epochs=a["clf_epochs"],
               weight=a["lambda"], variant="as_published", **sgd(a))

    def extra(now, want, seen, t):
        same(torch.stack([upload["variance"] for _, upload, _, _ in seen]), want["variance"], f"round {t}, variances")
        same(now.server["weights"], want["weights"], f"round {t}, weights")
        assert set(want["anchors"]) == {str(c) for c in range(CONFIG["classes"])}
        for c, stored in want["anchors"].items():
            same(now.server["anchors"][int(c)], stored, f"round {t}, anchor of class {c}")

    check(m, "FedPAC", extra)

def test_every_round_of_ifca_equals_the_released_code():
    a, init = args("IFCA"), GOLDEN["methods"]["IFCA"]["init"]["models"]

    class Golden(IFCA):
        "The models start as they are stored"
        def init_server(self, federation): return {"models": {str(m): tree(w) for m, w in enumerate(init)}}

    def extra(now, want, seen, t):
        for m, stored in enumerate(want["models"]): close(now.server["models"][str(m)], stored, f"round {t}, model {m}")
        found = {str(k): int(s["cluster"]) for k, s in enumerate(now.states)}
        assert found == want["cluster"], f"round {t}: identities"

    check(Golden(lr=a["lr"], epochs=a["epochs"], models=a["cluster_num"], **sgd(a)), "IFCA", extra)
