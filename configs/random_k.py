"""Random-k: 0.1 % of the values at random positions that all nodes draw alike; positions are not sent.

    python train.py --config configs/random_k.py
    python train.py --config configs/random_k.py --compressor.algorithm ring

The uncompressed steps before are the workload's, the same as for lgc_ps.

digits_convnet5: 97.2 % (seed 0; uncompressed 98.6 %), 2.7 kB up from every node in a step (uncompressed 1.56 MB),
one to three minutes on two cores.
With momentum at once and a learning rate of 0.1 a ResNet-20 diverged at 0.1 %: docs/results/long_runs.
"""

from jgc.compress import RandomK
from jgc.training.settings.config import Config


def get_config() -> Config[RandomK]:
    """alpha = 0.1 %, error feedback."""
    return Config(compressor=RandomK())
