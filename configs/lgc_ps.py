"""LGC with a parameter server (Abrahamyan et al. 2021), as a pattern for config files.

    python train.py --config configs/lgc_ps.py                                   # digits, 8 nodes
    python train.py --config configs/lgc_ps.py --workload cifar10_resnet20 --data-dir DIR

The same as `--method lgc_ps`: copy it, and give `LgcPs` and `Config` the settings of your experiment.
"""

from jgc.compress import LgcPs
from jgc.training.settings.config import Config


def get_config() -> Config[LgcPs]:
    """The method's defaults; lengths of phases come from the workload."""
    return Config(compressor=LgcPs())
