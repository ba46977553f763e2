"""The commands of `python -m experiments`."""

from jgc.lab.program import Program

COMMANDS = {
    "codecs": "experiments.codecs.command.Codecs",
    "correlation": "experiments.analysis.commands.Correlation",
    "information": "experiments.analysis.commands.Information",
    "worth": "experiments.analysis.commands.Worth",
    "exchanges": "experiments.exchanges.Exchanges",
    "select": "experiments.select.Select",
    "scaling": "experiments.scaling.Scaling",
    "sharded": "experiments.sharded.Shards",
    "step_time": "experiments.step_time.StepTime",
    "autoencoder": "experiments.recipes.Autoencoder",
    "loader": "experiments.loader.Loader",
    "loop": "experiments.loop.Loop",
}
PROGRAM = Program("python -m experiments", COMMANDS)

main = PROGRAM.main
