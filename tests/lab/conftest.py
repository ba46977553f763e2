"""Fixtures that several files share."""

from narrow import narrow_autoencoder

__all__ = ["narrow_autoencoder"]
