"""A node's process that meets the others by torchft: its `LocalSGD` over its managed Gloo group.

    python -m experiments.rounds.node_torchft '{"cell": {...}, "host": 0, "hosts": 4, ...}'

Every node is a replica group of one process. The lighthouse runs on node 0. A round averages the
parameters, after a quorum and before a commit of all groups.
"""

from datetime import timedelta
from typing import Any

import torch
from torch.distributed import TCPStore
from torchft import Manager, ProcessGroupGloo
from torchft.coordination import LighthouseServer
from torchft.local_sgd import LocalSGD

from experiments.rounds.node import serve
from experiments.rounds.node_torch import TorchNode
from jgc.lab.bench.network.namespaces import address

LIGHTHOUSE, STORE = 29_600, 29_700  # ports
PATIENCE = timedelta(seconds=1200)


class TorchftNode(TorchNode):
    """See `Node`."""

    def join(self) -> dict[str, Any]:
        facts = super().join()
        host, count = address(self.host), self.cell.nodes
        if self.host == 0:
            self.lighthouse = LighthouseServer(
                bind=f"0.0.0.0:{LIGHTHOUSE}", min_replicas=count, join_timeout_ms=60_000
            )
        self.store = TCPStore(host, STORE, is_master=True, wait_for_workers=False)
        self.manager = Manager(
            pg=ProcessGroupGloo(timeout=PATIENCE), load_state_dict=None, state_dict=None,
            min_replica_size=count, use_async_quorum=False, timeout=PATIENCE,
            quorum_timeout=PATIENCE, rank=0, world_size=1, store_addr=host, store_port=STORE,
            lighthouse_addr=f"http://{address(0)}:{LIGHTHOUSE}", replica_id=f"n{self.host}",
            hostname=host, init_sync=False,
        )  # fmt: skip
        every = self.cell.every
        self.local = LocalSGD(self.manager, self.model, self.adamw, every)
        self.local.sync()  # all begin alike, so this changes nothing but connects them
        return facts

    def exchange(self) -> None:
        self.local.sync()
        with torch.no_grad():
            for p, x in zip(self.theta, self.params, strict=True):
                p.copy_(x)
        self.done += 1

    def leave(self) -> None:
        self.manager.shutdown()  # its heartbeats would keep the counters of the link moving


def connect(options: dict[str, Any]) -> None:
    """One thread, as with PyTorch's rows; torchft makes the connections."""
    torch.set_num_threads(1)


if __name__ == "__main__":
    serve(TorchftNode, connect)
