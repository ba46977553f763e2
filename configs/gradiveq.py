"""GradiVeQ: principal components of convolution gradients, averaged as codes.

    python train.py --config configs/gradiveq.py
    python train.py --config configs/gradiveq.py --compressor.algorithm ring
    python train.py --config configs/gradiveq.py --compressor.reuse 1 --compressor.no-centred

Cycles of 100 and 400 steps and one basis a layer are the paper's. They cost accuracy in short runs, where the preset of
cifar10_resnet20 ends 1.0 ± 1.1 points below the baseline (500 steps, three seeds): docs/results/gradiveq.md.

digits_convnet5: 98.6 % (seed 0; uncompressed 98.6 %), 14.5 kB up from every node in a compressed step
(uncompressed 1.56 MB), one to three minutes on two cores.
"""

from jgc.compress import Gradiveq
from jgc.training.settings.config import Config


def get_config() -> Config[Gradiveq]:
    """Cycles of 100 and 400, lambda 0.01, one basis a layer; the uncompressed steps before come from the workload."""
    return Config(compressor=Gradiveq())
