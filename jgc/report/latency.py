"""What LGC's autoencoder costs, and what a compressed step saves, on this machine (Section VI-B of the paper)."""

from collections.abc import Sequence

import jax

from jgc.bench.timing import interleaved
from jgc.compress import _autoencoder as ae
from jgc.report import paper
from jgc.report.runs import Group, baseline_of
from jgc.report.tables import figures, table


def values_coded(group: Group) -> int | None:
    """m, the numbers that go into the encoder, from the size of the code that is sent; None where there is no code."""
    roles = group.runs[0].summary["phases"][-1]["wire"]["logical"].values()
    codes = [count for ways in roles for kind, count in ways.get("up", {}).items() if kind == "code"]
    width = 2 if group.settings.get("compressor.code_dtype") == "float16" else 4
    return round(min(codes) / width / ae.CHANNELS * ae.STRIDE) if codes else None


def milliseconds(m: int, repeats: int = 30) -> dict[str, float]:
    """Median milliseconds to encode m values of one node, and to decode them."""
    x = jax.random.normal(jax.random.key(0), (m,))
    weights = ae.init(jax.random.key(1), m, 1)
    decoder = jax.tree.map(lambda w: w[0], weights.decoders)
    code = ae.encode(weights.encoder, x)
    encode, decode = jax.jit(ae.encode), jax.jit(ae.decode)
    seconds = interleaved(
        {"encode": lambda: encode(weights.encoder, x), "decode": lambda: decode(decoder, code, x)}, repeats
    )
    return {name: 1000 * value for name, value in seconds.items()}


def latency_table(groups: Sequence[Group]) -> str:
    """Encoder and decoder of every method that has them, timed now; empty if none has."""
    rows = []
    for group in groups:
        m = values_coded(group)
        if m is None:
            continue
        ours = milliseconds(m)
        theirs = [f"{ms[group.method]:g}" if group.method in ms else "" for ms in (paper.ENCODER_MS, paper.DECODER_MS)]
        rows.append([group.label, f"{m:,}", f"{ours['encode']:.3f}", theirs[0], f"{ours['decode']:.3f}", theirs[1]])
    head = ["method", "values coded", "encoder, ms", "paper: encoder, ms", "decoder, ms", "paper: decoder, ms"]
    return table(head, rows) if rows else ""


def speed_up_table(groups: Sequence[Group]) -> str:
    """The baseline's median step over that of each method's last phase; empty without a baseline."""
    rows = []
    for group in groups:
        baseline = baseline_of(group, groups)
        if baseline is None or baseline is group:
            continue
        before, after = (list(figures(g, groups).seconds.values()) for g in (baseline, group))
        if before and after:
            theirs = f"{paper.SPEED_UP[group.method]}x" if group.method in paper.SPEED_UP else ""
            ours = [f"{before[-1]:.3f}", f"{after[-1]:.3f}", f"{before[-1] / after[-1]:.2f}x"]
            rows.append([group.label, *ours, theirs])
    head = ["method", "baseline, s a step", "last phase, s a step", "speed-up on this machine, without a network",
            "paper: speed-up"]  # fmt: skip
    return table(head, rows) if rows else ""
