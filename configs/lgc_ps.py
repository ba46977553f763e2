"""LGC with a parameter server (Abrahamyan et al. 2021): a learned code from one node, a few values from each.

    python train.py --config configs/lgc_ps.py                                   # digits, 8 nodes
    python train.py --config configs/lgc_ps.py --workload cifar10_resnet20 --data-dir DIR

digits_convnet5: 97.8 % (seed 0; uncompressed 98.2 over three seeds), 2.39 kB up from the leader and 1.99 kB from each
other node in a step (uncompressed 1.56 MB), one to three minutes on two cores.
cifar10_resnet20: see docs/results/cifar10.md.
"""

from jgc.compress import LgcPs
from jgc.training.settings.config import Config


def get_config() -> Config[LgcPs]:
    """The method's defaults; lengths of phases come from the workload."""
    return Config(compressor=LgcPs())
