"""Top-k at learned positions: all nodes search the same blocks of values in a step, so a position takes 8 bits.

    python train.py --config configs/learned_topk.py

The uncompressed steps before come from the workload, as for lgc_ps. Bytes and accuracy over 6,000 steps of
cifar10_resnet20: docs/results/learned_positions/README.md.
"""

from jgc.compress import LearnedTopK
from jgc.training.settings.config import Config


def get_config() -> Config[LearnedTopK]:
    """alpha = 0.1 %, 64 values searched for each one sent, 1-bit values."""
    return Config(compressor=LearnedTopK(value_code="1bit"))
