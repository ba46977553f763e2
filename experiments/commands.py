"""The commands of `python -m experiments`."""

from jgc.lab.program import Entry, Program

COMMANDS = {
    "codecs": Entry(
        "experiments.codecs.command.Codecs",
        "Bytes against error of every method and of trivial codes, on recorded gradients.",
    ),
    "correlation": Entry(
        "experiments.analysis.commands.Correlation",
        "Linear correlation within a convolution's gradients: GradiVeQ's Figures 4 and 5, and the age of a basis.",
    ),
    "information": Entry(
        "experiments.analysis.commands.Information",
        "Information that two nodes' gradients share: the LGC paper's Figures 3, 4 and 12, with controls.",
    ),
    "worth": Entry(
        "experiments.analysis.commands.Worth",
        "When one node's values predict the mean gradient, so that learned compression can help.",
    ),
    "exchanges": Entry(
        "experiments.exchanges.Exchanges",
        "Error of the mean of codes by gather, ring and two shots, and bytes, as nodes are added.",
    ),
    "select": Entry(
        "experiments.select.Select",
        "Time to select the largest values, next to lax.top_k, lax.approx_max_k, torch.topk and one read.",
    ),
    "rounds": Entry(
        "experiments.rounds.command.Rounds",
        "Utilisation, loss, bytes and requests of rounds through a bucket on slow links; needs root.",
    ),
    "scaling": Entry(
        "experiments.scaling.Scaling",
        "Bytes that a node sends in a step as nodes are added: rings, all-reduce and gathers.",
    ),
    "sharded": Entry(
        "experiments.sharded.Shards",
        "Memory and compile time of every method where parameters are sharded within a node (FSDP).",
    ),
    "step_time": Entry(
        "experiments.step_time.StepTime",
        "Seconds of a step in each phase of LGC next to the paper's Table V, and of the pieces of `lgc_ps`.",
    ),
    "autoencoder": Entry(
        "experiments.recipes.Autoencoder",
        "Reconstruction by the LGC paper's recipe for the autoencoder, by jgc's and by those between.",
    ),
    "predictions": Entry(
        "experiments.predictions.Predictions",
        "Errors of the predictions of `jgc advise` against a run of `jgc bench network`.",
    ),
    "papers": Entry(
        "experiments.papers.command.Papers",
        "Finished runs next to the papers' tables and figures; runs that differ only in their seed are one row.",
    ),
    "papers_bytes": Entry(
        "experiments.papers.planned.PapersBytes",
        "Ratios of the last phase, and bytes of a whole run, next to the papers'.",
    ),
    "loop": Entry(
        "experiments.loop.Loop",
        "Milliseconds of a step of train.py over its compiled program's.",
    ),
}
PROGRAM = Program("python -m experiments", COMMANDS)

main = PROGRAM.main
