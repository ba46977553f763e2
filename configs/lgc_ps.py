"""LGC with a parameter server (Abrahamyan et al. 2021): a learned code from one node, a few values from each.

    python train.py --config configs/lgc_ps.py                                   # digits, 8 nodes
    python train.py --config configs/lgc_ps.py --workload cifar10_resnet20 --data.dir DIR

digits_convnet5: expected accuracy TODO %, leader TODO bytes and other nodes TODO bytes up a step (uncompressed
1.56 MB), TODO s on two cores.
"""

from jgc.compress import LgcPs
from jgc.training.config import Config


def get_config() -> Config[LgcPs]:
    """The method's defaults; lengths of phases are the workload's."""
    return Config(compressor=LgcPs())
