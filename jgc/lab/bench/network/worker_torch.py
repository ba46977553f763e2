"""One host's PyTorch process: DistributedDataParallel over Gloo with its communication hooks, step by step.

    python -m jgc.lab.bench.network.worker_torch '{"host": 0, "hosts": 4, "coordinator": "10.77.0.1:9001", ...}'

Every method is a separate DDP model; they share the parameters' memory and the momentum. "alone" is the same step
with a group of this process only: its collectives are local, and it gathers its message K times.
"""

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from jgc.lab.bench.network import channel
from jgc.lab.bench.network.methods import SHARE
from jgc.lab.bench.network.models import LEARNING_RATE, MOMENTUM, POOL, Task, random_batch, task_named
from jgc.lab.bench.network.namespaces import INTERFACE
from jgc.lab.bench.network.results import COMPUTATION
from jgc.lab.bench.network.torch_model import model_of_task

ONE_BUCKET = 1000  # megabytes


class TopK:
    """A hook: the largest 0.1 % of each layer with error feedback, int32 positions and f32 values in one gather."""

    def __init__(self, group: Any, hosts: int):
        self.group, self.hosts, self.residual = group, hosts, torch.empty(0)

    def __call__(self, _: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        flat, starts, counts = bucket.buffer(), [], []
        if self.residual.numel() != flat.numel():  # DDP orders its bucket anew after the first step
            self.residual = torch.zeros_like(flat)
        flat.add_(self.residual)
        start, tops = 0, []
        for g in bucket.gradients():
            values = flat[start : start + g.numel()]
            k = max(1, round(SHARE * g.numel()))
            tops.append(values.abs().topk(k, sorted=False).indices + start)
            starts.append(start)
            counts.append(k)
            start += g.numel()
        positions = torch.cat(tops)
        values = flat[positions]
        self.residual.copy_(flat)
        self.residual[positions] = 0
        words = torch.cat([positions.to(torch.int32), values.view(torch.int32)])
        if dist.get_world_size(self.group) == 1:
            everyone = words.repeat(self.hosts)
        else:
            everyone = torch.empty(self.hosts * words.numel(), dtype=torch.int32)
            dist.all_gather_into_tensor(everyone, words, group=self.group)
        everyone = everyone.view(self.hosts, 2, -1)
        flat.zero_()
        what = everyone[:, 1].reshape(-1).view(torch.float32) / self.hosts
        flat.index_add_(0, everyone[:, 0].reshape(-1), what)
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(flat)
        return done


@dataclass
class Session:
    """State of a host between steps.

    Attributes:
      models: by (method, part); ("", "computation") is the bare model.
      params, velocity: shared by all models.
      apart: the momentum of steps without the network; they do not change the parameters, or hosts would diverge.
      batches: each (images f32[b, 3, 32, 32], labels i64[b]), or tokens i64[b, T] of a text.
      hosts: K.
      alone: the group of this process only.
      task: the model and its batches.
    """

    models: dict[tuple[str, str], Any]
    params: list[torch.Tensor]
    velocity: list[torch.Tensor]
    apart: list[torch.Tensor]
    batches: list[tuple[torch.Tensor, torch.Tensor]]
    hosts: int
    alone: Any
    task: Task
    step: int = 0


def model_of(session: Session) -> torch.nn.Module:
    """A model on the shared parameters."""
    model = model_of_task(session.task)
    for parameter, shared in zip(model.parameters(), session.params, strict=True):
        parameter.data = shared.data
    return model


def hook_of(method: str, group: Any, hosts: int) -> tuple[Any, Callable] | None:
    """The state and the hook of a method; None for plain DDP."""
    if method == "ddp_f32":
        return None
    if method == "ddp_fp16":
        return group, fp16_compress_hook
    if method == "ddp_topk":
        hook = TopK(group, hosts)
        return None, lambda state, bucket: hook(state, bucket)
    rank = int(method.removeprefix("ddp_powersgd_"))
    return PowerSGDState(group, matrix_approximation_rank=rank, start_powerSGD_iter=2), powerSGD_hook


def built(session: Session, method: str, part: str) -> DistributedDataParallel:
    """A method's DDP model, over all hosts ("full") or this process only ("alone")."""
    group = session.alone if part == "alone" else dist.group.WORLD
    settings: dict[str, Any] = {} if method in ("ddp_f32", "ddp_fp16") else {"bucket_cap_mb": ONE_BUCKET}
    model = DistributedDataParallel(model_of(session), process_group=group, gradient_as_bucket_view=True, **settings)
    hook = hook_of(method, group, session.hosts)
    if hook is not None:
        model.register_comm_hook(*hook)
    return model


def take(session: Session, method: str, part: str) -> None:
    """One step: forward, backward with the hook in it, update (SGD with momentum)."""
    inputs, labels = session.batches[session.step % POOL]
    session.step += 1
    model = session.models["" if part == COMPUTATION else method, part]
    cross_entropy(model(inputs).flatten(0, -2), labels.flatten()).backward()
    grads = [p.grad for p in model.parameters()]
    with torch.no_grad():
        velocity = session.velocity if part == "full" else session.apart
        torch._foreach_mul_(velocity, MOMENTUM)
        torch._foreach_add_(velocity, grads)
        torch._foreach_add_(session.params, velocity, alpha=-LEARNING_RATE if part == "full" else 0.0)
    model.zero_grad()


def start(options: dict[str, Any]) -> Session:
    """Join the other hosts and make the model."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    hosts, host, task = options["hosts"], options["host"], task_named(options["model"])
    dist.init_process_group("gloo", init_method=f"tcp://{options['coordinator']}", rank=host, world_size=hosts)
    alone = [dist.new_group([i]) for i in range(hosts)][host]
    model = model_of_task(task)
    params = [p.data for p in model.parameters()]
    random = np.random.default_rng(host)
    batches = [as_tensors(*random_batch(task, options["batch"], random)) for _ in range(POOL)]
    velocity, apart = ([torch.zeros_like(p) for p in params] for _ in range(2))
    return Session({("", COMPUTATION): model}, params, velocity, apart, batches, hosts, alone, task)


def as_tensors(inputs: np.ndarray, labels: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """A batch in PyTorch's layout and types."""
    image = inputs.ndim == 4
    features = torch.from_numpy(inputs).permute(0, 3, 1, 2).contiguous() if image else torch.from_numpy(inputs).long()
    return features, torch.from_numpy(labels).long()


def main() -> None:
    """Join the other hosts and serve the parent."""
    answers = channel.open_channel()
    session = start(json.loads(sys.argv[1]))

    def begin() -> dict[str, Any]:
        return {"tensors": len(session.params), "parameters": sum(p.numel() for p in session.params),
                "version": f"torch {torch.__version__}"}  # fmt: skip

    def build(method: str) -> dict[str, Any]:
        started = time.monotonic()
        for part in ("full", "alone"):
            session.models[method, part] = built(session, method, part)
        return {"physical": None, "compiled": None, "audit": "", "seconds": time.monotonic() - started}

    channel.serve(answers, {
        "begin": begin,
        "build": build,
        "prepare": lambda method, part: None,
        "step": lambda method, part, at: channel.timed(lambda: take(session, method, part), at),
        "finish": lambda method: None,
        "counters": lambda: channel.counters(INTERFACE),
        "digest": lambda: float(sum(p.double().abs().sum() for p in session.params)),
    })  # fmt: skip


if __name__ == "__main__":
    main()
