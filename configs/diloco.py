"""DiLoCo (Douillard et al. 2023): 30 steps of AdamW on every node, then the exact mean of how far the nodes have come.

    python train.py --config configs/diloco.py
    python train.py --config configs/diloco.py --local.every 10
    python train.py --config configs/diloco.py --workload digits_convnet5 --optimizer adam --learning-rate 0.002

The outer optimiser has the paper's Nesterov momentum, 0.9, and its learning rate, 0.7.
"""

from jgc.compress import Dense
from jgc.training.config import Config
from jgc.training.local_config import LocalConfig


def get_config() -> Config[Dense]:
    """H = 30 on ptb_gpt: a hundred exchanges in 3,000 steps."""
    return Config(compressor=Dense(), workload="ptb_gpt", local=LocalConfig(every=30))
