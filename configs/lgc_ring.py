"""LGC on a ring (Abrahamyan et al. 2021): codes of all nodes, averaged in a ring and decoded once.

    python train.py --config configs/lgc_ring.py
    python train.py --config configs/lgc_ring.py --compressor.algorithm psum --compressor.code-dtype int16
"""

from jgc.compress import LgcRing
from jgc.training.config import Config


def get_config() -> Config[LgcRing]:
    """The method's defaults; lengths of phases are the workload's."""
    return Config(compressor=LgcRing())
