"""`python -m jgc bench ...`: what can be run beside training."""

import sys
from pathlib import Path

import tyro

from jgc.training.cli import quiet
from jgc.training.errors import UserError


def bench_step(
    workload: str = "cifar10_resnet20",
    nodes: int = 8,
    repeats: int = 15,
    alpha: float = 0.001,
    output: Path | None = None,
) -> None:
    """Time a training step of every method and phase beside the dense one, and the pieces of lgc_ps.

    Args:
      workload: which model, batch and settings.
      nodes: data-parallel workers.
      repeats: rounds over all that is measured; medians are shown.
      alpha: share of each layer that is selected.
      output: a Markdown file to write; standard output if not given.
    """
    from jgc.bench.machine import describe
    from jgc.bench.step_time import markdown, measure

    page = markdown(measure(workload, nodes, repeats, alpha), describe())
    print(page)
    if output:
        output.write_text(f"# Time of a step\n\n    {command()}\n\n{page}")


def bench_autoencoder(
    run_dir: Path,
    workload: str = "digits_convnet5",
    seeds: tuple[int, ...] = (0, 1, 2),
    data_dir: str | None = None,
    steps: int | None = None,
    output: Path | None = None,
) -> None:
    """Reconstruction by the paper's autoencoder recipe, by ours and by what lies between, each in its own runs.

    Args:
      run_dir: folder for the runs; those that are finished there are not repeated.
      workload: which model, batch and settings.
      seeds: one run of every recipe for each.
      data_dir: folder of prepared data sets.
      steps: length of the runs; the workload's if not given.
      output: a Markdown file to write; standard output if not given.
    """
    from jgc.bench.machine import describe
    from jgc.bench.recipes import markdown, measure

    page = markdown(measure(run_dir, workload, seeds, data_dir, steps), workload, seeds, describe())
    print(page)
    if output:
        output.write_text(f"# Recipes of the autoencoder\n\n    {command()}\n\n{page}")


def bench_accuracy(
    run_dir: Path,
    methods: tuple[str, ...] = ("baseline", "lgc_ps", "control"),
    workload: str = "digits_convnet5",
    seeds: tuple[int, ...] = (0, 1, 2),
    data_dir: str | None = None,
    output: Path | None = None,
) -> None:
    """Accuracy and bytes of methods beside the uncompressed baseline and a control that sends nothing, over seeds.

    Args:
      run_dir: folder for the runs; those that are finished there are not repeated.
      methods: of baseline, lgc_ps, control, topk.
      workload: which model, batch and settings.
      seeds: one run of every method for each.
      data_dir: folder of prepared data sets.
      output: a Markdown file to write; standard output if not given.
    """
    from jgc.bench.accuracy import VARIANTS, markdown, measure
    from jgc.bench.machine import describe

    unknown = [name for name in methods if name not in VARIANTS]
    if unknown:
        raise UserError(f"unknown method {unknown[0]!r} (one of {', '.join(VARIANTS)})")
    page = markdown(measure(run_dir, methods, workload, seeds, data_dir), workload, seeds, describe())
    print(page)
    if output:
        output.write_text(f"# Accuracy and bytes\n\n    {command()}\n\n{page}")


def command() -> str:
    """The command line as a user types it."""
    return " ".join(["python -m jgc", *sys.argv[1:]])


def main() -> int:
    """Dispatch."""
    quiet()
    try:
        bench = tyro.extras.SubcommandApp()
        bench.command(name="step")(bench_step)
        bench.command(name="accuracy")(bench_accuracy)
        bench.command(name="autoencoder")(bench_autoencoder)
        if sys.argv[1:2] != ["bench"]:
            print("usage: python -m jgc bench {step,accuracy,autoencoder} --help", file=sys.stderr)
            return 2
        bench.cli(prog="python -m jgc bench", args=sys.argv[2:])
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0



if __name__ == "__main__":
    sys.exit(main())
