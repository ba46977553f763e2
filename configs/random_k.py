"""Random-k: 0.1 % of the values at random positions, the same on all nodes and never sent.

    python train.py --config configs/random_k.py
    python train.py --config configs/random_k.py --compressor.algorithm ring

The uncompressed steps before come from the workload, as for lgc_ps.

digits_convnet5: 97.2 % (seed 0; uncompressed 98.6 %), 2.7 kB up from every node in a step (uncompressed 1.56 MB),
one to three minutes on two cores.
With `momentum_at_once` and a learning rate of 0.1 a ResNet-20 diverged at 0.1 %: docs/results/long_runs.
"""

from jgc.compress import RandomK
from jgc.training.settings.config import Config


def get_config() -> Config[RandomK]:
    """alpha = 0.1 %, error feedback."""
    return Config(compressor=RandomK())
