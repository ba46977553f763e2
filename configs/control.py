"""A control, not a method: uncompressed for the workload's warm-up, then compressed layers send nothing.

What a run gains with it, it gains without compression having any part in it. An accuracy says something about a
method only where this falls clearly behind.

    python train.py --config configs/control.py

digits_convnet5: expected accuracy TODO %, TODO bytes up from every node in a step, TODO s on two cores.
"""

from jgc.compress import Silent
from jgc.training.config import Config


def get_config() -> Config[Silent]:
    """First layer dense, last layer top-k, nothing else."""
    return Config(compressor=Silent())
