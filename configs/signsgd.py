"""signSGD: the sign that most nodes have, for every value.

    python train.py --config configs/signsgd.py
    python train.py --config configs/signsgd.py --compressor.magnitude 0.001
    python train.py --config configs/signsgd.py --compressor.combine feedback
"""

from jgc.compress import SignSgd
from jgc.training.config import Config


def get_config() -> Config[SignSgd]:
    """Majority vote."""
    return Config(compressor=SignSgd())
