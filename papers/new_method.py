"MyMethod: FedAvg with one hook of its own"

from dataclasses import dataclass
from fedrepro.checks.contract import check
from fedrepro.core.trees import squared_norm
from fedrepro.engine.declarations import law
from fedrepro.engine.method import FedAvg
from fedrepro.methods.objective import from_received


@dataclass
class MyMethod(FedAvg):
    "FedAvg whose clients are tied to the model that they received"

    mu: float = 0.1  # weight of the term; a spec can set it
    # momentum: float = 0.0  # a default of its own, which `fedrepro compare` keeps
    limit = law(mu=0.0)  # MyMethod with mu = 0 is FedAvg: the check below tests it

    def loss(self, client, params, batch):
        "What a client minimises; `fedrepro notebook your_method` shows the other hooks"
        fit = super().loss(client, params, batch)
        moved = from_received(client, params)  # of what is trained
        return fit + self.mu / 2 * squared_norm(moved)


if __name__ == "__main__":
    print(check(MyMethod))
