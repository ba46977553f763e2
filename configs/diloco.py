"""DiLoCo (Douillard et al. 2023): 30 steps of AdamW on every node, then the exact mean of the nodes' progress.

    python train.py --config configs/diloco.py
    python train.py --config configs/diloco.py --local.every 10
    python train.py --config configs/diloco.py --workload digits_convnet5 --optimizer adam --learning-rate 0.002

The outer optimiser has the paper's Nesterov momentum, 0.9, and its learning rate, 0.7. On ptb_gpt
--local.outer-learning-rate 1 --local.outer-momentum 0.6 ended 0.10 nats lower in 900 steps (seed 0). With these, 3,000
steps end 0.04 nats above AdamW with an exchange in every step, for 30 times fewer bytes (three seeds):
docs/results/local_steps.
"""

from jgc.compress import Dense
from jgc.training.settings.config import Config
from jgc.training.settings.local_config import LocalConfig


def get_config() -> Config[Dense]:
    """H = 30 on ptb_gpt: a hundred exchanges in 3,000 steps."""
    return Config(compressor=Dense(), workload="ptb_gpt", local=LocalConfig(every=30))
