"""LGC on a ring (Abrahamyan et al. 2021): codes of all nodes, averaged in a ring and decoded once.

    python train.py --config configs/lgc_ring.py
    python train.py --config configs/lgc_ring.py --compressor.algorithm psum --compressor.code-dtype int16

digits_convnet5: 97.8 % (seed 0; uncompressed 98.6 %), 2.23 kB up from the step's leader and 1.58 kB from each
other node in a step (uncompressed 1.56 MB), about two minutes on two cores. cifar10_resnet20: see
docs/results/cifar10_compare.
"""

from jgc.compress import LgcRing
from jgc.training.settings.config import Config


def get_config() -> Config[LgcRing]:
    """The method's defaults; lengths of phases come from the workload."""
    return Config(compressor=LgcRing())
