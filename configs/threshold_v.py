"""Threshold-v: the values above a fixed threshold, in a buffer of 1 % of each layer.

    python train.py --config configs/threshold_v.py
    python train.py --config configs/threshold_v.py --compressor.threshold 0.001 --compressor.capacity 0.005

The right threshold depends on the model and the learning rate: watch `overflow` (too low: the buffer is full) and
`elements_sent` (too high: the buffer is empty, but sent all the same). The warm-up comes from the
workload.

digits_convnet5: 98.3 % (seed 0; uncompressed 98.6 %), 20.9 kB up from every node in a step (uncompressed 1.56 MB),
one to three minutes on two cores.
"""

from jgc.compress import ThresholdV
from jgc.training.settings.config import Config


def get_config() -> Config[ThresholdV]:
    """Threshold 0.01, room for 1 % of the values."""
    return Config(compressor=ThresholdV())
