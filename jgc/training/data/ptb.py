"""Penn Treebank as Mikolov prepared it: 929,589 words of newspaper text to train on, a vocabulary of 10,000.

Three files with one sentence a line, in lower case, numbers as N and rare words as <unk>. The package contains none of
the text: its licence is the Linguistic Data Consortium's.

References:
    Marcus, Santorini and Marcinkiewicz, "Building a Large Annotated Corpus of English: The Penn Treebank", 1993.
    Mikolov et al., "Recurrent neural network based language model", Interspeech 2010: this form of it.
"""

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from jgc.training.data.dataset import MissingDataError, data_folder
from jgc.training.data.text import Text, Words

FOLDER = "ptb"
FILES = {split: f"ptb.{split}.txt" for split in ("train", "valid", "test")}
END, UNKNOWN = "<eos>", "<unk>"
UNKNOWN_CHARACTER = "\N{REPLACEMENT CHARACTER}"
WINDOW = 20  # Zaremba et al. 2014, the small model
CHARACTERS = 128  # in a window


def load_ptb(data_dir: str | os.PathLike[str] | None = None) -> Text:
    """The three texts, from the folder `ptb` in `data_dir`, as numbers of words with <eos> after each sentence.

    The vocabulary is that of the training text, the most frequent word first; unknown words become <unk>. Raises
    MissingDataError: a file is missing, cannot be read or is empty.
    """
    folder = data_folder(data_dir) / FOLDER
    texts = [_read(folder, file) for file in FILES.values()]
    vocabulary = vocabulary_of(texts[0])
    train, valid, test = (numbers(words, vocabulary) for words in texts)
    return Text("ptb", train, valid, test, vocabulary, WINDOW)


def load_ptb_characters(data_dir: str | os.PathLike[str] | None = None) -> Text:
    """The three texts of `load_ptb` as numbers of characters: words with a space between them, sentences on lines."""
    folder = data_folder(data_dir) / FOLDER
    texts = ["\n".join(map(str.strip, " ".join(_read(folder, file)).split(END))).removesuffix("\n")
             for file in FILES.values()]  # fmt: skip
    vocabulary = vocabulary_of(texts[0], UNKNOWN_CHARACTER)
    train, valid, test = (numbers(text, vocabulary, UNKNOWN_CHARACTER) for text in texts)
    return Text("ptb_characters", train, valid, test, vocabulary, CHARACTERS, characters=True)


def _read(folder: Path, file: str) -> list[str]:
    """The words of a file, with <eos> after each line."""
    path = folder / file
    problem = "there is no" if not path.is_file() else ""
    try:
        words = [] if problem else words_of(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise MissingDataError(f"ptb: cannot read {path}: {error}") from error
    if not words:
        raise MissingDataError(
            f"ptb is missing: {problem or 'no words in'} {path}; put the files {', '.join(FILES.values())} from the "
            f"folder data of simple-examples.tgz, the examples of Mikolov's RNNLM toolkit, into {folder}"
        )
    return words


def words_of(text: str) -> list[str]:
    """The words of a text, with <eos> after each line."""
    return [word for line in text.splitlines() for word in (*line.split(), END)]


def vocabulary_of(words: Iterable[str], unknown: str = UNKNOWN) -> tuple[str, ...]:
    """The distinct words, or characters, by falling frequency and then by alphabet; `unknown` at the end if missing."""
    counts = Counter(words)
    counts.setdefault(unknown, 0)
    return tuple(sorted(counts, key=lambda word: (-counts[word], word)))


def numbers(words: Sequence[str], vocabulary: tuple[str, ...], unknown: str = UNKNOWN) -> Words:
    """Each word's position in the vocabulary, int32[n]; that of `unknown` for words that it lacks."""
    places = {word: place for place, word in enumerate(vocabulary)}
    other = places[unknown]
    return np.fromiter((places.get(word, other) for word in words), np.int32, len(words))
