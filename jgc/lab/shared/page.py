"""Print a page of results, and write it into a file."""

from collections.abc import Callable
from pathlib import Path

from jgc.lab.shared import progress
from jgc.training.errors import UserError, cannot_write
from jgc.training.run.folder import write_whole


def publish(
    title: str,
    text: str,
    output: Path | None,
    line: str,
    draw: Callable[[Path], None] | None = None,
    alt: str = "",
) -> None:
    """Print a page. If there is an output file, write the page there, below its title and its command.

    Args:
      title: heading of the file.
      text: the page, Markdown.
      output: the file, if any.
      line: the command line that made the page.
      draw: writes a picture of the given path; it is written next to the file and shown at its end.
      alt: text for readers without the picture.
    """
    print(text)
    if output is None:
        return
    check_output(output)
    if draw is not None:
        _make_folder(output)
        picture = output.with_suffix(".png")
        if picture == output:
            raise UserError(f"--output must be a Markdown file; {output} is where its picture goes")
        draw(picture)
        text += f"\n![{alt}]({picture.name})\n"
    write_page(output, title, line, text)


def check_output(output: Path | None) -> None:
    """Raise UserError for a path that cannot be a file's."""
    if output is not None and (not output.name or output.is_dir()):
        raise UserError(f"--output must be a Markdown file, got {str(output)!r}, a folder")


def write_page(output: Path, title: str, line: str, text: str) -> None:
    """Write a page below its title, its command and what Ctrl-C cut short.

    Raises:
      UserError: it cannot be written.
    """
    _make_folder(output)
    head = "\n\n".join([f"# {title}", f"    {line}", *progress.cut_short])
    write_whole(output, f"{head}\n\n{text}".encode())


def _make_folder(output: Path) -> None:
    """Make the folder of a file.

    Raises:
      UserError: it cannot be made.
    """
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cannot_write(output.parent, error) from error


def check_repeats(repeats: int) -> None:
    """Raise UserError unless there is at least one round."""
    if repeats < 1:
        raise UserError(f"--repeats must be at least 1, got {repeats}")
