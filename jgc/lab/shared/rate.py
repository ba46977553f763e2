"""Parse link rates such as "100mbit"."""

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
