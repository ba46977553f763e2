"""`python -m experiments`: correlation, information and worth."""

from dataclasses import dataclass
from pathlib import Path

import tyro

from experiments.analysis import correlation_page, information_page, mean_gradients, worth_page


@dataclass(frozen=True)
class Correlation:
    """Linear correlation within a convolution's gradients: GradiVeQ's Figures 4 and 5, and the age of a basis.

    Trains without compression, records one layer, and measures the recording.

        python -m experiments correlation --workload cifar10_resnet20 --steps 350 --output correlation

        - A slice's basis loses far more on the next steps than on its samples. First slice: 0.8% lost on the
          samples (lambda = 0.01), 66.4% at ages 1 to 10.
    """

    output: Path = Path("correlation")
    """folder of the page, its pictures and numbers, and the recording"""
    workload: str = "cifar10_resnet20"
    """model, data set, batch and settings"""
    nodes: int = 8
    """data-parallel nodes"""
    seed: int = 0
    """of the run that is recorded"""
    start: int = 100
    """uncompressed steps before the first that is recorded"""
    steps: int = 500
    """how many are recorded"""
    layer: str = ""
    """pattern of the path of one convolution's kernel; if not given, one in the middle of the model"""
    samples: int = 100
    """steps that a basis is computed from, L_t; the steps after them are held out"""
    loss: float = 0.01
    """share of variance that may be lost on the samples, lambda"""
    data_dir: str | None = None
    """folder of prepared data sets"""
    from_recording: Path | None = None
    """recording.npz of an earlier run to measure again, without training; replaces the options of the run"""

    def run(self, line: str) -> None:
        """Record unless there is a recording, and write the page."""
        if self.from_recording is not None:
            recording = mean_gradients.load(self.from_recording)
        else:
            correlation_page.check_settings(self.steps, self.samples, self.loss)
            recording = mean_gradients.record(
                self.workload, self.nodes, self.seed, self.start, self.steps, self.layer, self.data_dir
            )
            self.output.mkdir(parents=True, exist_ok=True)
            mean_gradients.save(self.output / mean_gradients.NAME, recording)
        print(correlation_page.write(self.output, recording, self.samples, self.loss, line))


@dataclass(frozen=True)
class Information:
    """Information that two nodes' gradients share: the LGC paper's Figures 3, 4 and 12, with controls.

    A run recorded with --record.residuals shows ScaleCom's similarity of residuals as well.

        python -m experiments information runs/digits-2 runs/digits-8 --output information

        - Two nodes share little: 0.085 bits a value, the mean over layers large and small, by nearest neighbours
    """

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """folders of runs with a recording (train.py --record.every N)"""
    output: Path = Path("information")
    """folder of the page, its pictures and tables"""
    layers: str = ""
    """pattern of the layers to measure; all that were recorded if not given"""
    pairs: int = 4
    """random pairs of nodes at each step, where there are more than two nodes"""
    neighbours: int = 10_000
    """values of a layer that the nearest-neighbour estimate uses"""

    def run(self, line: str) -> None:
        """Measure, and write the page."""
        print(information_page.write(self.output, self.runs, self.layers, self.pairs, self.neighbours, line))


@dataclass(frozen=True)
class Worth:
    """When one node's values predict the mean gradient, so that learned compression can help.

    Measures the leader's prediction by the share of values, the number of nodes, the batch and the step.

        python -m experiments worth runs/digits-8 runs/cifar-16 --output worth

        - With 2 nodes and alpha = 0.10% the correlation adds nothing to what the leader's share in the mean gives
    """

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """folders of runs with a recording (train.py --record.every N)"""
    output: Path = Path("worth")
    """folder of the page, its pictures and its table"""
    layers: str = ""
    """pattern of the layers to measure; all that were recorded if not given"""
    alpha: float = 0.001
    """share of the values that is selected, where the share is not what varies"""
    draws: int = 4
    """random subsets of the nodes for each case"""

    def run(self, line: str) -> None:
        """Measure, and write the page."""
        print(worth_page.write(self.output, self.runs, self.layers, self.alpha, self.draws, line))
