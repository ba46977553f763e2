"""A node's process in PyTorch: local SGD as its users write it, with an all-reduce over Gloo.

    python -m experiments.rounds.node_torch '{"cell": {...}, "host": 0, "hosts": 4, ...}'

H steps of AdamW, the mean of how far the nodes have come, and SGD with Nesterov momentum: DiLoCo.
"""

from collections.abc import Callable
from statistics import mean
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_

from experiments.rounds.node import Node, serve
from experiments.rounds.training import config_of, data_of
from jgc.lab.bench.network.models import task_named
from jgc.lab.bench.network.torch_model import model_of_task
from jgc.lab.bench.network.worker_torch import as_tensors


class TorchNode(Node):
    """See `Node`."""

    def __init__(self, options: dict[str, Any]):
        super().__init__(options)
        self.data = data_of(self.cell.workload, options["data_dir"])
        self.config = config_of(self.cell.workload)
        torch.manual_seed(self.cell.seed)  # the same first parameters on all hosts
        self.model = model_of_task(task_named(self.cell.workload))
        self.params = list(self.model.parameters())

    def join(self) -> dict[str, Any]:
        config, outer = self.config, self.cell.outer
        groups = [
            {"params": [p for p in self.params if (p.ndim > 1) == decays], "weight_decay": decay}
            for decays, decay in ((True, config.weight_decay), (False, 0.0))
        ]
        betas, warmup = (0.9, config.adam_beta2), max(1, config.learning_rate_warmup)
        self.adamw = torch.optim.AdamW(groups, config.learning_rate, betas=betas)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.adamw, lambda step: min(1.0, (step + 1) / warmup)
        )
        self.theta = [p.detach().clone().requires_grad_() for p in self.params]
        self.outer = torch.optim.SGD(
            self.theta, outer.rate, momentum=outer.momentum, nesterov=bool(outer.momentum)
        )
        self._loss(self.data.batch(self.cell.seed, self.host, 0)).backward()
        payload = 4 * sum(p.numel() for p in self.params)
        return {
            "seconds": 0.0, "payload": payload, "version": f"torch {torch.__version__}",
            "data": self.data.text.name,
        }  # fmt: skip

    def inner(self, step: int) -> None:
        self.adamw.zero_grad()
        self._loss(self.data.batch(self.cell.seed, self.host, step)).backward()
        if self.config.clip_norm:
            clip_grad_norm_(self.params, self.config.clip_norm)
        self.adamw.step()
        self.schedule.step()

    @torch.no_grad()
    def exchange(self) -> None:
        """The mean of all nodes' differences is the gradient of the outer step."""
        pairs = zip(self.theta, self.params, strict=True)
        flat = torch.cat([(a - b).flatten() for a, b in pairs])
        dist.all_reduce(flat)
        flat /= self.cell.nodes
        parts = flat.split([p.numel() for p in self.params])
        for p, part in zip(self.theta, parts, strict=True):
            p.grad = part.view_as(p)
        self.outer.step()
        self._go_on_from(self.theta)
        self.done += 1

    def validation_loss(self) -> Callable[[list[torch.Tensor]], float]:
        batches = self.data.validation_batches()

        @torch.no_grad()
        def loss(params: list[torch.Tensor]) -> float:
            self._go_on_from(params)
            return mean(float(self._loss(batch)) for batch in batches)

        return loss

    def shared(self) -> list[torch.Tensor]:
        return [p.detach().clone() for p in self.theta]

    def digest(self) -> str:
        return repr([float(p.detach().double().abs().sum()) for p in self.theta])

    def _go_on_from(self, theta: list[torch.Tensor]) -> None:
        for p, x in zip(self.params, theta, strict=True):
            p.copy_(x)

    def _loss(self, batch: Any) -> torch.Tensor:
        tokens, labels = as_tensors(*batch)
        return cross_entropy(self.model(tokens).flatten(0, -2), labels.flatten())


def connect(options: dict[str, Any]) -> None:
    """Meet the other hosts' processes."""
    torch.set_num_threads(1)
    rank, size = options["host"], options["hosts"]
    address = f"tcp://{options['coordinator']}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=size)
    dist.all_reduce(torch.zeros(1))  # makes the connections


if __name__ == "__main__":
    serve(TorchNode, connect)
