"""Parse link rates such as "100mbit", and print them."""

import math
import re

UNITS = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9, "tbit": 1e12}


def bytes_per_second(rate: str) -> float:
    """A rate such as "100mbit" or "1Gbit" (bits per second, powers of 1,000) in bytes per second.

    Raises:
      ValueError: the rate is not of this form, or not positive.

    Example:
      >>> bytes_per_second("100mbit")
      12500000.0
    """
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([kmgt]?bit)(?:/s|ps)?\s*", rate.lower())
    if not match or not float(match[1]) > 0:
        raise ValueError(f"a rate must be written as 100mbit or 1gbit, got {rate!r}")
    return float(match[1]) * UNITS[match[2]] / 8


def bits(rate: float) -> str:
    """Bytes a second as bits, for people.

    Example:
      >>> bits(12.5e6), bits(124.99e6), bits(float("inf"))
      ('100 Mbit/s', '1 Gbit/s', 'unlimited bandwidth')
    """
    if rate == math.inf:
        return "unlimited bandwidth"
    bits = float(f"{8 * rate:.3g}")
    unit = next((u for u in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")) if bits >= u[0]), (1.0, ""))
    return f"{bits / unit[0]:.3g} {unit[1]}bit/s"
