"""signSGD: the sign that most nodes have, for every value. A vote is +1 or -1: it wants a small learning rate.

    python train.py --config configs/signsgd.py
    python train.py --config configs/signsgd.py --learning-rate 0.0003
    python train.py --config configs/signsgd.py --compressor.combine feedback
"""

from jgc.compress import SignSgd
from jgc.training.config import Config


def get_config() -> Config[SignSgd]:
    """Majority vote."""
    return Config(compressor=SignSgd())
