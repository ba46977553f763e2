"""`python -m jgc bench ...`: the command line of every benchmark, whose modules are imported when one runs."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from jgc.training.errors import UserError, values_of_the_user


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
    from jgc.lab.bench.machine import describe
    from jgc.lab.bench.step_time import markdown, measure

    if repeats < 1:
        raise UserError(f"--repeats must be at least 1, got {repeats}")
    with values_of_the_user():
        page = markdown(measure(workload, nodes, repeats, alpha), describe())
    publish("Time of a step", page, output)


def bench_methods(
    methods: tuple[str, ...] = (),
    workload: str = "digits_convnet5",
    nodes: int = 8,
    repeats: int = 15,
    alpha: float | None = None,
    output: Path | None = None,
) -> None:
    """Time of every method and phase beside the dense step, by part; bytes of its state and of what it sends.

    Args:
      methods: names separated by commas or spaces, dense beside them in any case; all if not given.
      workload: which model, batch and settings.
      nodes: data-parallel workers.
      repeats: rounds over all that is measured; medians and their spread are shown.
      alpha: share of each layer that is selected; the workload's if not given.
      output: a Markdown file to write; standard output if not given.
    """
    from jgc.lab.bench.machine import describe
    from jgc.lab.bench.methods import markdown, measure
    from jgc.lab.report.compare import words

    if repeats < 1:
        raise UserError(f"--repeats must be at least 1, got {repeats}")
    with values_of_the_user():
        page = markdown(measure(workload, nodes, repeats, words(methods), alpha), describe())
    publish("Cost of every method", page, output)


def bench_bytes(
    workload: str = "cifar10_resnet50",
    alpha: float = 0.001,
    stem: Literal["", "cifar", "imagenet"] = "",
    classes: int = 0,
    output: Path | None = None,
) -> None:
    """What each method sends in a step of its last phase, from a model's shapes, beside the LGC paper's Table VI.

    Args:
      workload: which model and how many nodes.
      alpha: share of each layer that is selected.
      stem: of a ResNet; the workload's if not given.
      classes: outputs of the head; the data set's if not given. The paper's sizes suggest 1000.
      output: a Markdown file to write; standard output if not given.
    """
    from jgc.lab.bench.message_sizes import markdown, measure

    with values_of_the_user():
        page = markdown(*measure(workload, alpha, stem, classes), alpha)
    publish("Bytes of a step", page, output)


def bench_scaling(
    workload: str = "cifar10_resnet20",
    nodes: tuple[int, ...] = (2, 3, 4, 6, 8, 12, 16),
    alpha: float = 0.001,
    output: Path | None = None,
) -> None:
    """What a node sends in a step as nodes are added: rings, all-reduce and gathers, from a model's shapes.

    Args:
      workload: which model.
      nodes: numbers of data-parallel workers.
      alpha: share of each layer that top-k selects.
      output: a Markdown file to write, with a picture of the same name; standard output if not given.
    """
    from jgc.lab.bench.scaling import draw, markdown, measure, shapes_of

    if not nodes or min(nodes) < 2:
        raise UserError(f"--nodes must be numbers of at least 2, got {' '.join(map(str, nodes)) or 'none'}")
    with values_of_the_user():
        shapes = shapes_of(workload)
        points = measure(shapes, sorted(set(nodes)), alpha)
    page = markdown(points, workload, shapes)
    if output:
        picture = output.with_suffix(".png")
        draw(picture, points, f"{workload}: what a node sends in a step")
        page += f"\n![Bytes that a node sends in a step over the number of nodes]({picture.name})\n"
    publish("Bytes of a step as nodes are added", page, output)


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
    from jgc.lab.bench.machine import describe
    from jgc.lab.bench.recipes import markdown, measure

    page = markdown(measure(run_dir, workload, seeds, data_dir, steps), workload, seeds, describe())
    publish("Recipes of the autoencoder", page, output)


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
    from jgc.lab.bench.accuracy import VARIANTS, markdown, measure
    from jgc.lab.bench.machine import describe

    unknown = [name for name in methods if name not in VARIANTS]
    if unknown:
        raise UserError(f"unknown method {unknown[0]!r} (one of {', '.join(VARIANTS)})")
    page = markdown(measure(run_dir, methods, workload, seeds, data_dir), workload, seeds, describe())
    publish("Accuracy and bytes", page, output)


def bench_codecs(
    run_dir: Path,
    workload: str = "digits_convnet5",
    nodes: int = 8,
    seed: int = 0,
    start: int = 20,
    steps: int = 45,
    hold_out: int = 5,
    alphas: tuple[float, ...] = (0.001, 0.005, 0.02, 0.1),
    passes: int = 1,
    data_dir: str | None = None,
    output: Path | None = None,
) -> None:
    """Bytes against error of every method and of trivial codes, on gradients recorded from an uncompressed run.

    Args:
      run_dir: folder of the recording; one that is there already is used again.
      workload: which model, batch and settings.
      nodes: data-parallel workers.
      seed: of the run recorded.
      start: uncompressed steps before the first recorded.
      steps: how many are recorded.
      hold_out: the last of them, which are compressed; codes learn from those before.
      alphas: shares of each layer that is selected.
      passes: how often a method with something to learn sees those steps.
      data_dir: folder of prepared data sets.
      output: a Markdown file to write, with a picture of the same name; standard output if not given.
    """
    from jgc.lab.bench.codecs import markdown, measure
    from jgc.lab.bench.codecs_plot import draw
    from jgc.lab.bench.machine import describe
    from jgc.lab.bench.record import record
    from jgc.layout.select import check_alpha

    if not 0 < hold_out < steps:
        raise UserError(f"--hold-out must be between 1 and --steps - 1 = {steps - 1}, got {hold_out}")
    with values_of_the_user():
        for alpha in alphas:
            check_alpha(alpha)
    recording = record(run_dir, workload, nodes, seed, start, steps, data_dir)
    rows = measure(recording, hold_out, alphas, passes)
    page = markdown(rows, workload, recording, hold_out, describe())
    print(page)
    if output:
        picture = output.with_suffix(".png")
        draw(picture, rows, f"{workload}, {nodes} nodes: what a code makes of one step's gradients, and what it costs")
        link = f"![Cosine and relative error against bits per parameter]({picture.name})"
        output.write_text(f"# Bytes against error\n\n    {command()}\n\n{page}\n{link}\n")


def bench_select(
    sizes: tuple[str, ...] = ("1e5", "1e6", "1e7", "2.56e7", "1e8"),
    alpha: float = 0.001,
    repeats: int = 15,
    output: Path | None = None,
) -> None:
    """Time of selecting the largest values beside lax.top_k, lax.approx_max_k, torch.topk and one read of them.

    Args:
      sizes: numbers of values, separated by commas or spaces.
      alpha: share of them that is selected.
      repeats: rounds over all that is measured; medians and quartiles are shown.
      output: a Markdown file to write; standard output if not given.
    """
    from jgc.lab.bench import select
    from jgc.lab.bench.machine import describe
    from jgc.layout.select import check_alpha

    if repeats < 1:
        raise UserError(f"--repeats must be at least 1, got {repeats}")
    with values_of_the_user():
        check_alpha(alpha)
        counts = select.sizes_of(sizes)
    torch, before = select.find_torch(), select.load()
    timings = [select.measure(size, alpha, repeats, torch) for size in counts]
    page = select.markdown(timings, describe(), torch, f"load average {before} before and {select.load()} after")
    publish("Selection of the largest values", page, output)


def bench_network(
    run_dir: Path,
    hosts: tuple[str, ...] = ("4",),
    rates: tuple[str, ...] = ("100mbit", "1gbit", "unlimited"),
    methods: tuple[str, ...] = (),
    steps: int = 20,
    model: str = "resnet18",
    batch: int = 2,
    short: bool = False,
) -> None:
    """Time and bytes of every method between real processes, beside PyTorch's and plain JAX; needs root and iproute2.

    Args:
      run_dir: folder of what is measured, the page and pictures; what is there already is not measured again.
      hosts: numbers of hosts, network namespaces of this machine, separated by commas or spaces.
      rates: of every host's link in both directions, such as 100mbit, or unlimited.
      methods: separated by commas or spaces; settings after colons (topk:alpha=0.01). All with 4 hosts, a few
        otherwise, if not given.
      steps: of every method; at most 4 of those whose bytes alone take more than a second.
      model: resnet18 (11.2 million parameters), resnet20 or convnet5.
      batch: images of a host in a step.
      short: a quick look instead: two hosts, two rates, three methods, a small model.
    """
    from jgc.lab.bench import network

    plan = network.plan_of(hosts, rates, methods, steps, model, batch)
    print(network.run(network.short(plan) if short else plan, run_dir, command()))


def bench_loader(
    workload: str = "imagenet_resnet50",
    data_dir: str | None = None,
    threads: tuple[int, ...] = (),
    steps: int = 4,
    made: int = 0,
    output: Path | None = None,
) -> None:
    """Images per second that a workload's loader makes, with nothing but the loader at work.

    Args:
      workload: which images, batch and crops.
      data_dir: folder of prepared data sets.
      threads: numbers of threads that decode; 1, 2, 4 and so on up to the processors if not given.
      steps: batches that are made and timed, after one that is not.
      made: instead of the data set, so many photographs of ImageNet's mean size, made up for this.
      output: a Markdown file to write; standard output if not given.
    """
    from jgc.lab.bench.loader import markdown, measure
    from jgc.lab.bench.machine import describe

    if steps < 1 or made < 0 or any(count < 1 for count in threads):
        raise UserError(f"--steps and --threads must be at least 1 and --made at least 0, got {steps}, "
                        f"{' '.join(map(str, threads)) or 'none'} and {made}")  # fmt: skip
    with values_of_the_user():
        page = markdown(measure(workload, data_dir, threads, steps, made), describe())
    publish("Rate of the loader", page, output)


def publish(title: str, page: str, output: Path | None) -> None:
    """Print a page, and write it into a file under its title and the command that made it."""
    print(page)
    if output:
        output.write_text(f"# {title}\n\n    {command()}\n\n{page}")


def command() -> str:
    """The command line as a user types it."""
    return " ".join(["python -m jgc", *sys.argv[1:]])


BENCH: dict[str, Callable[..., None]] = {
    "step": bench_step,
    "select": bench_select,
    "methods": bench_methods,
    "bytes": bench_bytes,
    "scaling": bench_scaling,
    "accuracy": bench_accuracy,
    "autoencoder": bench_autoencoder,
    "codecs": bench_codecs,
    "loader": bench_loader,
    "network": bench_network,
}
