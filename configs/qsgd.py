"""QSGD: every value in 4 bits, rounded at random so that the mean is right.

    python train.py --config configs/qsgd.py
    python train.py --config configs/qsgd.py --compressor.bits 2
    python train.py --config configs/qsgd.py --compressor.norm l2
    python train.py --config configs/qsgd.py --compressor.exchange ring --compressor.error-feedback
"""

from jgc.compress import Qsgd
from jgc.training.config import Config


def get_config() -> Config[Qsgd]:
    """4 bits, buckets of 512 values, scaled by the maximum."""
    return Config(compressor=Qsgd())
