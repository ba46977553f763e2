"""Random-k: 0.1 % of the values at random positions that all nodes draw alike; positions are not sent.

    python train.py --config configs/random_k.py
    python train.py --config configs/random_k.py --compressor.algorithm ring

The uncompressed steps before are the workload's, the same as for lgc_ps.
"""

from jgc.compress import RandomK
from jgc.training.config import Config


def get_config() -> Config[RandomK]:
    """alpha = 0.1 %, error feedback."""
    return Config(compressor=RandomK())
