"""What to cite, in BibTeX: jgc, or a method's papers."""

from pathlib import Path

from jgc import compress
from jgc.compress import METHODS

PAPERS = Path(compress.__file__).with_name("papers.bib")  # entries, an empty line between two
JGC = """@software{jgc,
  title = {{jgc}: gradient compression for {JAX}},
  author = {{The jgc authors}},
  version = {VERSION},
  license = {Apache-2.0},
  year = {2026},
}"""


def citation(method: str = "") -> str:
    """BibTeX of a method's papers, by its name in `jgc.compress.METHODS`.

    Without a name, and for methods that are in no paper, such as `klt`: of jgc.

    Raises:
      ValueError: no method has this name.

    Example:
      >>> print(citation("powersgd").splitlines()[0])
      @inproceedings{vogels2019powersgd,
    """
    if method and method not in METHODS:
        raise ValueError(f"no method is called {method!r}; there are {', '.join(METHODS)}")
    if method and METHODS[method].citation:
        entries = PAPERS.read_text(encoding="utf-8").strip().split("\n\n")
        by_key = {entry.partition("{")[2].partition(",")[0]: entry for entry in entries}
        return "\n".join(by_key[key] for key in METHODS[method].citation)
    from jgc import __version__

    return JGC.replace("VERSION", __version__)
