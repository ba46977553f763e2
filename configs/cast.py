"""Casts: every value in a shorter floating-point format, bfloat16 unless another is chosen.

    python train.py --config configs/cast.py
    python train.py --config configs/cast.py --compressor.format float8_e4m3 --compressor.error-feedback
"""

from jgc.compress import Cast
from jgc.training.config import Config


def get_config() -> Config[Cast]:
    """bfloat16."""
    return Config(compressor=Cast())
