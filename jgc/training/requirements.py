"""The packages of the extra `train`, which `import jgc` works without."""

PACKAGES = frozenset(
    "PIL array_record importlib_resources markdown_it matplotlib orbax rich sklearn tensorboardX tensorflow_datasets "
    "tyro".split()
)
INSTALL = "pip install 'jgc[train]', or in a clone of jgc: pip install -e '.[train]'"


def explain(error: ModuleNotFoundError) -> str:
    """One line that says how to install a missing package of the extra.

    Example:
      >>> explain(ModuleNotFoundError(name="tyro"))
      "error: tyro is not installed: pip install 'jgc[train]', or in a clone of jgc: pip install -e '.[train]'"
    """
    package = (error.name or "").partition(".")[0]
    if package not in PACKAGES:
        raise error
    return f"error: {package} is not installed: {INSTALL}"
