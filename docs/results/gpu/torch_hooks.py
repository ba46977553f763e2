"""A training step under PyTorch's DDP on one GPU: plain, and with its PowerSGD and bf16 hooks.

    python docs/results/gpu/torch_hooks.py

A transformer of 25.5M parameters, 8 sequences of 128 tokens, AdamW; one process with NCCL.
"""

import os
import statistics
import time

import torch
from torch import distributed, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

WIDTH, LAYERS, HEADS, TOKENS = 512, 8, 8, 256
WARM_UP, ROUNDS, STEPS = 20, 7, 10


class Transformer(nn.Module):
    """Embedding, encoder layers and an output layer."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.embedding, self.output = nn.Embedding(TOKENS, WIDTH), nn.Linear(WIDTH, TOKENS)
        self.encoder = nn.TransformerEncoder(layer, LAYERS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.output(self.encoder(self.embedding(tokens)))


def milliseconds(hook: tuple | None) -> float:
    """Median over rounds of steps, with a hook `(state, function)` or without."""
    model = DistributedDataParallel(Transformer().cuda(), device_ids=[0], bucket_cap_mb=25)
    if hook:
        model.register_comm_hook(*hook)
    tokens = torch.randint(0, TOKENS, (8, 128), device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()

    for _ in range(WARM_UP):
        step()
    torch.cuda.synchronize()
    rounds = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        for _ in range(STEPS):
            step()
        torch.cuda.synchronize()
        rounds.append((time.perf_counter() - started) / STEPS * 1e3)
    return statistics.median(rounds)


def power_sgd(rank: int) -> tuple:
    """The hook with no layer left uncompressed."""
    settings = {"matrix_approximation_rank": rank, "start_powerSGD_iter": 2, "min_compression_rate": 1}
    return powerSGD_hook.PowerSGDState(None, **settings), powerSGD_hook.powerSGD_hook


if __name__ == "__main__":
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29517", RANK="0", WORLD_SIZE="1")
    torch.manual_seed(0)
    distributed.init_process_group("nccl")
    hooks = {"plain": None, "PowerSGD, rank 1": power_sgd(1), "PowerSGD, rank 4": power_sgd(4)}
    hooks |= {"bf16": (None, default_hooks.bf16_compress_hook), "plain again": None}
    for name, hook in hooks.items():
        print(f"{name:20s} {milliseconds(hook):8.3f} ms a step", flush=True)
    distributed.destroy_process_group()
