"""The end of a run: summary.json, curves.png, masks.png and the closing table."""

from typing import Any

from jgc.training.output import curves, masks, summary, table
from jgc.training.output.metrics import read
from jgc.training.run.folder import CURVES, MASKS, METRICS, ROUNDS, SAMPLE, SUMMARY, write_json, write_whole
from jgc.training.run.record import Run
from jgc.training.run.rounds_file import summarised
from jgc.training.steps.evaluate import Shown
from jgc.training.steps.overhead import other_bytes
from jgc.training.steps.step import TrainState


def finish(
    run: Run, state: TrainState, scores: dict[str, float], shown: Shown | None, sample: str | None = None
) -> None:
    """Write the files, masks.png and sample.txt only if given, and print the closing table.

    `scores`: of the state, if metrics.jsonl does not have them.
    """
    lines, config, source = read(run.folder / METRICS), run.config, run.setup.source
    first = {phase.name: run.costs[phase.value]._replace(phase=phase) for phase in reversed(run.entered)}
    costs = tuple(reversed(first.values()))  # one a name: cycles enter a phase more than once
    other = other_bytes(run.setup, state, costs, lines, pictures=shown is not None)
    result: dict[str, Any] = summary.summarise(run.setup, int(state.step), lines, costs, other, scores)
    if how := config.rounds.bucket:
        result["rounds"] = summarised(read(run.folder / ROUNDS), how, config.rounds.node)
    title = f"{result['method']} on {config.workload}, {table.nodes_of(result)}, seed {config.seed}"
    curves.draw(run.folder, title, lines, costs, source.score, *source.further)
    files = [SUMMARY, CURVES, METRICS, *([ROUNDS] if how else [])]
    if shown is not None:
        masks.draw(run.folder, f"{title}, after {result['steps']} steps", shown.pictures, shown.labels)
        files.insert(2, MASKS)
    table.show(result, run.console)
    if sample is not None:
        write_whole(run.folder / SAMPLE, sample.encode())
        files.insert(2, SAMPLE)
        run.console.print("a sample of the model's text:", highlight=False)
        run.console.print(sample, highlight=False, markup=False)
    write_json(run.folder / SUMMARY, result)  # last: a run that has it is finished, and is not taken up again
    names = f"{', '.join(files[:-1])} and {files[-1]}"
    run.console.print(f"{names} are in {run.folder}", highlight=False, soft_wrap=True)
