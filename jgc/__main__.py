"""`python -m jgc report|compare|sweep|plan|bench|analyze|advise ...`: what can be run beside training."""

import sys
from collections.abc import Callable, Sequence
from functools import partial, wraps
from pathlib import Path
from typing import Any, Literal

from jgc.training.errors import UserError, did_you_mean
from jgc.training.extra import explain

try:
    import tyro

    from jgc.lab.bench import commands
    from jgc.lab.bench.commands import command
    from jgc.training.cli import exit_code_of, quiet
    from jgc.training.options import read
except ModuleNotFoundError as error:  # after `pip install jgc` without [train]
    sys.exit(explain(error))

USAGE = "usage: python -m jgc {report,compare,sweep,plan,bench,analyze,advise} --help"
Settings = tyro.conf.UseAppendAction[tuple[str, ...]]
Figures = tyro.conf.UseAppendAction[tuple[Literal[7, 10, 11, 13, 14], ...]]


def report(
    runs: tyro.conf.Positional[tuple[Path, ...]],
    output: Path = Path("report"),
    figure: Figures = (),
    latency: bool = False,
    bandwidth: str = "1gbit",
) -> None:
    """Tables and pictures of finished runs, those that differ only in seed as one row: report.md and report.html.

    Args:
      runs: run folders, or folders of them.
      output: folder of the report.
      figure: draw a figure of the LGC paper, or 7 of the GradiVeQ paper, from these runs as well; may be given several
        times.
      latency: time the encoder and the decoder of LGC's autoencoder on this machine, too.
      bandwidth: of each node's link, such as 100mbit or 1gbit, for figure 7.
    """
    from jgc.lab.report.page import write

    if not runs:
        raise UserError("give the folders of runs, or a folder of them: python -m jgc report RUN...")
    print(write(runs, output, figure, latency, bandwidth=bandwidth))


def compare(
    run_dir: Path,
    methods: tuple[str, ...] = ("baseline", "sparse_gd", "lgc_ps", "control"),
    workload: str = "digits_convnet5",
    seeds: tuple[str, ...] = ("0", "1", "2"),
    data_dir: str | None = None,
    steps: int | None = None,
    schedule_steps: int | None = None,
    learning_rate_warmup: int | None = None,
    warmup_steps: int | None = None,
    autoencoder_steps: int | None = None,
    evaluate_every: int | None = None,
    nodes: int | None = None,
    set: Settings = (),
) -> None:
    """Train every method for every seed, as far as that has not been done, and write the report on them.

    Args:
      run_dir: folder of the runs, {method}-seed{seed}, and of the report.
      methods: baseline, sparse_gd, control and names of methods, separated by commas or spaces.
      workload: which model, batch and settings.
      seeds: one run of every method for each, separated by commas or spaces.
      data_dir: folder of prepared data sets.
      steps: length of the runs; this and all below: the workload's if not given.
      schedule_steps: steps over which the learning rate falls.
      learning_rate_warmup: steps over which it first rises.
      warmup_steps: uncompressed steps of the methods that have such.
      autoencoder_steps: steps in which an autoencoder trains, where there is one.
      evaluate_every: steps between evaluations.
      nodes: data-parallel workers.
      set: any other option of train.py, for all runs (learning_rate=0.1) or one method's (dgc.clip_norm=1, which is its
        own; dgc.learning_rate=0.05); may be given several times, and has the last word.
    """
    settings = {
        "steps": steps,
        "schedule_steps": schedule_steps,
        "learning_rate_warmup": learning_rate_warmup,
        "warmup_steps": warmup_steps,
        "autoencoder_steps": autoencoder_steps,
        "evaluate_every": evaluate_every,
        "nodes": nodes,
    }
    from jgc.lab.report.compare import compare as train_and_report

    changes = {name: value for name, value in settings.items() if value is not None}
    print(train_and_report(methods, seeds, workload, run_dir, data_dir, changes, set))


def sweep(
    run_dir: Path,
    field: str,
    values: tuple[str, ...],
    methods: tuple[str, ...] = ("egc",),
    workload: str = "digits_convnet5",
    seeds: tuple[str, ...] = ("0", "1", "2"),
    data_dir: str | None = None,
    steps: int | None = None,
    warmup_steps: int | None = None,
    nodes: int | None = None,
    set: Settings = (),
) -> None:
    """Train with several values of one setting, as far as that has not been done: a table and a picture.

    Args:
      run_dir: folder of the runs, {method}-{setting}={value}-seed{seed}, and of sweep.md and sweep.png.
      field: a setting of train.py, such as nodes, or with compressor. before it one of the methods' own, such as
        compressor.ratio. A method that does not have it is trained once, to compare with.
      values: of the setting, separated by commas or spaces.
      methods: as in compare.
      workload: which model, batch and settings.
      seeds: one run for each, separated by commas or spaces.
      data_dir: folder of prepared data sets.
      steps: length of the runs; this and all below: the workload's if not given.
      warmup_steps: uncompressed steps of the methods that have such.
      nodes: data-parallel workers.
      set: any other option of train.py, as in compare.
    """
    from jgc.lab.report.sweep import sweep as train_and_show

    given = {"steps": steps, "warmup_steps": warmup_steps, "nodes": nodes}
    changes = {name: value for name, value in given.items() if value is not None}
    print(train_and_show(field, values, methods, seeds, workload, run_dir, data_dir, changes, set, command()))


def plan(
    workload: str = "digits_convnet5",
    nodes: int | None = None,
    methods: tuple[str, ...] = ("baseline", "dgc", "scalecom", "lgc_ps", "lgc_ring"),
    devices: int | None = None,
    measure: Literal["nothing", "node", "step"] = "node",
    set: Settings = (),
) -> None:
    """What a run will need: memory of a device, and bytes that each method sends. Nothing is trained, no data is read.

    Args:
      workload: which model, batch and settings.
      nodes: data-parallel workers; the workload's if not given.
      methods: as in compare.
      devices: over which the nodes are spread; as they would be on this machine if not given.
      measure: what the compiler is asked for: step, the whole program of every phase, which takes minutes for large
        models; node, the gradients of one node, from which the others' follow; nothing, only estimates.
      set: any other option of train.py, as in compare.
    """
    from jgc.lab.plan.plan import plans_of
    from jgc.lab.plan.tables import show
    from jgc.lab.report.compare import options_of, variants_of, words

    variants = variants_of(words(methods))
    show(plans_of(variants, workload, nodes, devices, measure, options_of(set, variants)))


def analyze_correlation(
    output: Path = Path("correlation"),
    workload: str = "cifar10_resnet20",
    nodes: int = 8,
    seed: int = 0,
    start: int = 100,
    steps: int = 500,
    layer: str = "",
    samples: int = 100,
    loss: float = 0.01,
    data_dir: str | None = None,
    from_recording: Path | None = None,
) -> None:
    """How far a convolution's gradients are linearly correlated: GradiVeQ's Figures 4 and 5, and the age of a basis.

    Args:
      output: folder of the page, its pictures and numbers, and the recording.
      workload: which model, batch and settings.
      nodes: data-parallel workers.
      seed: of the run recorded.
      start: uncompressed steps before the first recorded.
      steps: how many are recorded.
      layer: a pattern that the path of one convolution's kernel matches; one in the middle of the model if not given.
      samples: steps that a basis is made from, L_t; those after them are held out.
      loss: share of variance that may be lost on the samples, lambda.
      data_dir: folder of prepared data sets.
      from_recording: a recording.npz of before to measure and draw again, without training; replaces the options of
        the run.
    """
    from jgc.lab.analysis import mean_gradients
    from jgc.lab.analysis.correlation_page import check_settings, write

    if from_recording is not None:
        recording = mean_gradients.load(from_recording)
    else:
        check_settings(steps, samples, loss)
        recording = mean_gradients.record(workload, nodes, seed, start, steps, layer, data_dir)
        output.mkdir(parents=True, exist_ok=True)
        mean_gradients.save(output / mean_gradients.NAME, recording)
    print(write(output, recording, samples, loss, command()))


def analyze_information(
    runs: tyro.conf.Positional[tuple[Path, ...]],
    output: Path = Path("information"),
    layers: str = "",
    pairs: int = 4,
    neighbours: int = 10_000,
) -> None:
    """What two nodes' gradients have in common, from recorded runs: the LGC paper's Figures 3, 4 and 12, with controls.

    Args:
      runs: folders of runs with a recording (train.py --record.every N); one with --record.residuals shows ScaleCom's
        similarity of residuals as well.
      output: folder of the page, its pictures and tables.
      layers: a pattern of the layers to measure; all that were recorded if not given.
      pairs: random ones at each step, where there are more than two nodes.
      neighbours: values of a layer that the nearest-neighbour estimate takes.
    """
    from jgc.lab.analysis.information_page import write

    print(write(output, runs, layers, pairs, neighbours, command()))


def analyze_worth(
    runs: tyro.conf.Positional[tuple[Path, ...]],
    output: Path = Path("worth"),
    layers: str = "",
    alpha: float = 0.001,
    draws: int = 4,
) -> None:
    """When one node's values predict the mean gradient, so that learned compression can help, from recorded runs.

    Args:
      runs: folders of runs with a recording (train.py --record.every N).
      output: folder of the page, its pictures and its table.
      layers: a pattern of the layers to measure; all that were recorded if not given.
      alpha: share of the values picked, where it is not what varies.
      draws: random subsets of the nodes for each case.
    """
    from jgc.lab.analysis.worth_page import write

    print(write(output, runs, layers, alpha, draws, command()))


def advise(
    config: Path | None = None,
    workload: str | None = None,
    bandwidth: str = "1gbit",
    hosts: int = 4,
    latency: float | None = None,
    computation: float | None = None,
    methods: tuple[str, ...] = (),
    batch_size: int | None = None,
    overhead: float = 0.001,
    efficiency: float = 0.9415,
    host_limit: str = "unlimited",
    calibrate: Path | None = None,
    calibrate_on: str = "4/100mbit",
    check: Path | None = None,
    run_dir: Path | None = None,
    repeats: int = 10,
    output: Path | None = None,
) -> None:
    """Does compression pay? Time per step and bytes of every method on a network that need not be there.

    Computation and compression are measured on this device; what the network takes is estimated.

    Args:
      config: a config file; its settings count for its method, the workload's for the others.
      workload: which model, batch and settings; the config's if not given.
      bandwidth: of every host's link in both directions, such as 100mbit or 1gbit, or unlimited.
      hosts: how many, one node each.
      latency: seconds of a message on its way; 0.0001 if not given, or what --calibrate finds.
      computation: seconds of a host's gradients and update; measured if not given.
      methods: separated by commas or spaces; all if not given. Compiling those of LGC takes minutes for large models.
      batch_size: examples of all hosts in a step; the workload's if not given.
      overhead: seconds of a collective, whatever it carries.
      efficiency: share of the bandwidth that is left for messages; of TCP over Ethernet if not given.
      host_limit: what a host's processor can send at most, as a rate.
      calibrate: results.json of bench network, or its folder, from which to find overhead, efficiency and host limit.
      calibrate_on: the hosts and the rate of that run to find them from.
      check: results.json of bench network, or its folder: only show how far its cells are from predictions.
      run_dir: a run of bench network to take the times of computing from, instead of measuring.
      repeats: rounds of measuring; medians are taken.
      output: folder for advise.md and advise.json.
    """
    from jgc.lab.advise.command import Question, tell, tell_check
    from jgc.lab.report.compare import words

    if check is not None:
        return tell_check(check, calibrate_on, output, command())
    tell(Question(config, workload, bandwidth, hosts, latency, computation, words(methods), batch_size, overhead,
                  efficiency, host_limit, calibrate, calibrate_on, run_dir, repeats), output, command())  # fmt: skip


COMMANDS: dict[str, dict[str, Callable[..., None]]] = {
    "report": {"": report},
    "compare": {"": compare},
    "sweep": {"": sweep},
    "plan": {"": plan},
    "bench": commands.BENCH,
    "analyze": {"correlation": analyze_correlation, "information": analyze_information, "worth": analyze_worth},
    "advise": {"": advise},
}


def parse(argv: Sequence[str]) -> Callable[[], Any]:
    """What a command line asks for, to be called.

    Raises:
      UserError: one line on what is wrong with it.
      SystemExit: after --help.
    """
    functions, prog, rest = COMMANDS[argv[0]], f"python -m jgc {argv[0]}", list(argv[1:])
    if "" in functions:
        return read(_deferred(functions[""]), rest, prog)
    if rest and rest[0] in functions:
        return read(_deferred(functions[rest[0]]), rest[1:], f"{prog} {rest[0]}")
    if rest[:1] in (["-h"], ["--help"]):
        app = tyro.extras.SubcommandApp()
        for name, function in functions.items():
            app.command(name=name)(function)
        app.cli(prog=prog, args=["--help"])
    got = f", got {rest[0]!r}{did_you_mean(rest[0], list(functions))}" if rest else ""
    raise UserError(f"{prog} must be followed by one of {', '.join(functions)}{got}")


def _deferred(function: Callable[..., None]) -> Callable[..., Callable[[], None]]:
    """The same command line, but what comes of it is still to be called."""

    @wraps(function)
    def later(*args: Any, **kwargs: Any) -> Callable[[], None]:
        return partial(function, *args, **kwargs)

    return later


def main(argv: Sequence[str] | None = None) -> int:
    """Run what the command line asks for and return the exit code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    quiet()
    if argv[:1] in (["-h"], ["--help"]):
        print(USAGE)
        return 0
    if not argv or argv[0] not in COMMANDS:
        if argv:
            hint = did_you_mean(argv[0], list(COMMANDS))
            print(f"error: unknown command {argv[0]!r}{hint}", file=sys.stderr)
        print(USAGE, file=sys.stderr)
        return 2

    def run_it() -> int:
        parse(argv)()
        return 0

    return exit_code_of(run_it)


if __name__ == "__main__":
    sys.exit(main())
