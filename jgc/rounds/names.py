"""Names of a run's objects. Numbers have eight digits, so names sort as numbers do.

run.json                     the run's settings, by its first node
checkpoint/00000020          the shared state after 20 rounds
rounds/00000003/paris.msg    a node's message of round 3
rounds/00000003/paris.1.msg  the same, where something else has the name before it
rounds/00000003/paris.here   "wait for me in this round"
rounds/00000003/paris.left   "do not wait for me"
rounds/00000003/close        the list of round 3: who counts
"""

import re
from collections.abc import Iterable

RUN, CHECKPOINTS, ROUNDS, CLOSE = "run.json", "checkpoint", "rounds", "close"
_NODE = re.compile(r"[A-Za-z0-9_-]{1,60}")
_MESSAGE = re.compile(rf"({_NODE.pattern})(?:\.([1-9]))?\.msg")
ATTEMPTS = 10  # names that a node tries for its message


def number_of(text: str) -> int | None:
    """The number of a round or checkpoint in an object's name; None for foreign names.

    Example:
      >>> number_of("00000020"), number_of("20"), number_of("notes")
      (20, None, None)
    """
    return int(text) if re.fullmatch(r"[0-9]{8}|[1-9][0-9]{8,14}", text) else None


def checkpoints_in(names: Iterable[str]) -> list[int]:
    """The numbers of the checkpoints among the names of their folder, in order.

    Example:
      >>> checkpoints_in(["checkpoint/00000020", "checkpoint/00000000", "checkpoint/notes"])
      [0, 20]
    """
    folder = f"{CHECKPOINTS}/"
    inside = (name.removeprefix(folder) for name in names if name.startswith(folder))
    return sorted(number for text in inside if (number := number_of(text)) is not None)


def check_node(node: str) -> None:
    """Raise ValueError for a node's name that cannot be a part of an object's name."""
    if not isinstance(node, str) or not _NODE.fullmatch(node):
        raise ValueError(f"node must be 1 to 60 letters, digits, - and _, got {node!r}")


def round_folder(number: int) -> str:
    """The folder of a round."""
    return f"{ROUNDS}/{number:08d}"


def close_name(number: int) -> str:
    """The name of a round's list."""
    return f"{round_folder(number)}/{CLOSE}"


def node_name(number: int, node: str, suffix: str) -> str:
    """The name of a node's object in a round; the suffix is "here" or "left"."""
    return f"{round_folder(number)}/{node}.{suffix}"


def message_name(number: int, node: str, attempt: int = 0) -> str:
    """The name of a node's message in a round. Attempt 1 is for a node that cannot have name 0.

    Example:
      >>> message_name(3, "paris"), message_name(3, "paris", 1)
      ('rounds/00000003/paris.msg', 'rounds/00000003/paris.1.msg')
    """
    return f"{round_folder(number)}/{node}.{f'{attempt}.' if attempt else ''}msg"


def checkpoint_name(number: int) -> str:
    """The name of a checkpoint."""
    return f"{CHECKPOINTS}/{number:08d}"


def before_round(number: int) -> str:
    """The start, exclusive, of a listing of rounds from `number` on.

    "~" sorts after every name in a folder. After the folder's name itself, SeaweedFS leaves out the
    whole folder, and AWS begins with its first object.

    Example:
      >>> before_round(2), before_round(0)
      ('rounds/00000001~', '')
    """
    return f"{round_folder(number - 1)}~" if number else ""


def by_round(names: dict[str, int]) -> dict[int, dict[str, int]]:
    """Listed names as {round: {name inside its folder: size}}, without foreign names.

    Example:
      >>> by_round({"rounds/00000003/a.msg": 7, "rounds/notes.txt": 1})
      {3: {'a.msg': 7}}
    """
    rounds: dict[int, dict[str, int]] = {}
    for name, size in names.items():
        parts = name.split("/")
        if len(parts) == 3 and (number := number_of(parts[1])) is not None:
            rounds.setdefault(number, {})[parts[2]] = size
    return rounds


def nodes_with(names: Iterable[str], suffix: str) -> list[str]:
    """The nodes that have a notice of this suffix among the names of a round, sorted.

    Example:
      >>> nodes_with({"b.here": 1, "a.here": 1, "a.left": 1, "close": 1}, "here")
      ['a', 'b']
    """
    nodes = (name.rpartition(".") for name in names)
    return sorted(node for node, _, end in nodes if end == suffix and _NODE.fullmatch(node))


def messages_in(names: Iterable[str]) -> list[tuple[str, int]]:
    """Node and attempt of the messages among the names of a round, sorted.

    Example:
      >>> messages_in({"b.msg": 1, "a.1.msg": 1, "a.msg": 1, "a.here": 1, "close": 1})
      [('a', 0), ('a', 1), ('b', 0)]
    """
    matches = (_MESSAGE.fullmatch(name) for name in names)
    return sorted((x[1], int(x[2] or 0)) for x in matches if x)
