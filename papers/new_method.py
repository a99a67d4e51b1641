"MyMethod: FedAvg with one hook of its own"

from dataclasses import dataclass
from fedrepro.checks.contract import check
from fedrepro.core.trees import squared_norm, sub
from fedrepro.engine.declarations import law
from fedrepro.engine.method import FedAvg


@dataclass
class MyMethod(FedAvg):
    "FedAvg whose clients are tied to the model that they received"

    mu: float = 0.1  # weight of the term; a spec can set it
    # momentum: float = 0.0  # a default of its own, which `fedrepro compare` keeps
    limit = law(mu=0.0)  # MyMethod with mu = 0 is FedAvg: the check below tests it

    def loss(self, client, params, batch):
        "What a client minimises; `fedrepro notebook your_method` shows the other hooks"
        return super().loss(client, params, batch) + self.mu / 2 * squared_norm(
            sub(params, client.received["params"])
        )


if __name__ == "__main__":
    print(check(MyMethod))
