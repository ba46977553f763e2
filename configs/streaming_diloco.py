"""Streaming DiLoCo (Douillard et al. 2025): DiLoCo in three fragments, one every 10 steps, applied 5 steps later.

    python train.py --config configs/streaming_diloco.py
    python train.py --config configs/streaming_diloco.py --local.overlap 0 --local.merge 0

A node keeps half of its parameters when it adopts the shared ones, as in the paper. The largest message is a
third of DiLoCo's, and has 5 steps of time to travel. On ptb_gpt, with outer rate 1 and momentum 0.6, it ends at 1.318
nats a character (3,000 steps, three seeds; DiLoCo 1.235): docs/results/local_steps.
"""

from jgc.compress import Dense
from jgc.training.settings.config import Config
from jgc.training.settings.local_config import LocalConfig


def get_config() -> Config[Dense]:
    """H = 30, three fragments, an overlap of 5 steps."""
    local = LocalConfig(every=30, fragments=3, overlap=5, merge=0.5)
    return Config(compressor=Dense(), workload="ptb_gpt", local=local)
