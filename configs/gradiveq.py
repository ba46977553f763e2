"""GradiVeQ: principal components of convolution gradients, averaged as codes.

    python train.py --config configs/gradiveq.py
    python train.py --config configs/gradiveq.py --compressor.algorithm ring
    python train.py --config configs/gradiveq.py --compressor.reuse 1 --compressor.no-centred

The settings are the paper's: cycles of 100 and 400 steps, one basis a layer. In short runs they cost accuracy, and
cifar10_resnet20 has a preset that does not: docs/results/gradiveq.md.
"""

from jgc.compress import Gradiveq
from jgc.training.config import Config


def get_config() -> Config[Gradiveq]:
    """The paper's settings: 2,500 steps of warm-up, cycles of 100 and 400, lambda 0.01, one basis a layer."""
    return Config(compressor=Gradiveq())
