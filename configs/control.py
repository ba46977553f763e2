"""A control, not a method: uncompressed for the workload's warm-up, then compressed layers send nothing.

No method can claim the accuracy that this control reaches: compare methods on workloads where it falls clearly behind.

    python train.py --config configs/control.py

digits_convnet5: 92.2 ± 1.0 % against the baseline's 98.2 ± 0.4 (three seeds), 1.16 kB up from every node in a step,
about a minute on two cores.
"""

from jgc.compress import Silent
from jgc.training.settings.config import Config


def get_config() -> Config[Silent]:
    """The first layer is sent dense, the last by top-k, nothing else (see `--layers`)."""
    return Config(compressor=Silent())
