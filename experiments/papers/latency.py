"""Time of LGC's autoencoder, and of a compressed step, on this machine (Section VI-B of the paper)."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from experiments.papers.reported import DECODER_MS, ENCODER_MS, SPEED_UP
from jgc.compress.lgc import autoencoder as ae
from jgc.lab.report.runs import Group, baseline_of
from jgc.lab.report.tables import figures
from jgc.lab.shared.tables import table
from jgc.lab.shared.timing import interleaved
from jgc.wire.blocks import BLOCK_FORMATS, in_blocks


def values_coded(group: Group) -> int | None:
    """m, the length of the encoder's input, from the size of the code; None if there is no code."""
    if group.method not in ("lgc_ps", "lgc_ring"):
        return None
    roles = group.runs[0].summary["phases"][-1]["wire"]["logical"].values()
    codes = [count for ways in roles for kind, count in ways.get("up", {}).items() if kind == "code"]
    if not codes:
        return None
    bits = bits_per_value(group.settings.get("compressor.code_dtype", "float32"))
    return round(8 * min(codes) / bits / ae.CHANNELS * ae.STRIDE)


def bits_per_value(code: str) -> int:
    """Bits of a value in a value code, without scales and padding."""
    if code in BLOCK_FORMATS:
        return in_blocks(code).bits
    return int(code[0]) if code[1:].startswith("bit") else 8 * jnp.dtype(code).itemsize


def milliseconds(m: int, decoder: str | None = None, repeats: int = 30) -> dict[str, float]:
    """Median milliseconds to encode m values of one node, and to decode them.

    Args:
      m: values.
      decoder: of `lgc_ring`, "linear" or "leaky_relu"; None for one node's decoder of `lgc_ps`.
      repeats: rounds.
    """
    x, key = jax.random.normal(jax.random.key(0), (m,)), jax.random.key(1)
    if decoder is None:
        weights = ae.init(key, m, 1)
        encoder, decoder_weights = weights.encoder, jax.tree.map(lambda w: w[0], weights.decoders)
        decode = jax.jit(lambda code: ae.decode(decoder_weights, code, x))
    else:
        pair = ae.init_pair(key, m, decoder == "linear")
        encoder, decode = pair.encoder, jax.jit(lambda code: ae.decode_mean(pair.decoder, code, decoder == "linear"))
    encode = jax.jit(lambda x: ae.encode(encoder, x))
    code = encode(x)
    seconds = interleaved({"encode": lambda: encode(x), "decode": lambda: decode(code)}, repeats)
    return {name: 1000 * value for name, value in seconds.items()}


def latency_table(groups: Sequence[Group]) -> str:
    """Time encoder and decoder of each method that has them; empty if none has."""
    rows = []
    for group in groups:
        m = values_coded(group)
        if m is None:
            continue
        measured = milliseconds(m, group.settings.get("compressor.decoder"))
        reported = [
            f"{ms[group.method]:g}" if group.method in ms else "" for ms in (ENCODER_MS, DECODER_MS)
        ]
        rows.append(
            [group.label, f"{m:,}", f"{measured['encode']:.3f}", reported[0], f"{measured['decode']:.3f}", reported[1]]
        )
    head = ["method", "values coded", "encoder, ms", "paper: encoder, ms", "decoder, ms", "paper: decoder, ms"]
    return table(head, rows) if rows else ""


def _of_last_phase(group: Group, groups: Sequence[Group]) -> float | None:
    """Seconds a step of the last phase; None if it was too short for any."""
    return figures(group, groups).seconds.get(group.runs[0].summary["phases"][-1]["name"])


def speed_up_table(groups: Sequence[Group]) -> str:
    """Ratio of the baseline's median step to that of each method's last phase; empty without a baseline."""
    rows = []
    for group in groups:
        baseline = baseline_of(group, groups)
        if baseline is None or baseline is group:
            continue
        before, after = (_of_last_phase(g, groups) for g in (baseline, group))
        if before and after:
            reported = f"{SPEED_UP[group.method]}x" if group.method in SPEED_UP else ""
            measured = [f"{before:.3f}", f"{after:.3f}", f"{before / after:.2f}x"]
            rows.append([group.label, *measured, reported])
    head = ["method", "baseline, s a step", "last phase, s a step", "speed-up on this machine, without a network",
            "paper: speed-up"]  # fmt: skip
    return table(head, rows) if rows else ""
