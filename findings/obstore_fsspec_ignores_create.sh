#!/usr/bin/env bash
# Finding: obstore's FsspecStore overwrites an object when it is asked to create one.
#
# Versions: obstore 0.12.1, fsspec 2026.x as pip resolves it below (printed); LocalStore and MemoryStore.
# Guess:    pipe_file(path, data, mode="create") raises FileExistsError if the object is there, as fsspec documents and
#           as obstore.put(store, path, data, mode="create") does (AlreadyExistsError).
# Seen:     the object is replaced, and nothing is said. Who elects a leader or makes a lock that way has two of them.
# Cure:     obstore.put with mode="create" on the store itself.
# Exits with 0 if all of this is still so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet "obstore==0.12.1" "fsspec"
cat > "$folder/run.py" <<'PY'
import sys

import fsspec
import obstore
from fsspec.implementations.memory import MemoryFileSystem
from obstore.exceptions import AlreadyExistsError
from obstore.fsspec import FsspecStore
from obstore.store import LocalStore

print("fsspec", fsspec.__version__)
folder = sys.argv[1]
files = FsspecStore("file")
path = f"{folder}/lock"
files.pipe_file(path, b"first", mode="create")
files.pipe_file(path, b"second", mode="create")
print("FsspecStore, pipe_file(mode='create') twice:", files.cat_file(path))
assert files.cat_file(path) == b"second"

store = LocalStore(folder)
try:
    obstore.put(store, "lock", b"third", mode="create")
except AlreadyExistsError as error:
    print("obstore.put(mode='create'):", type(error).__name__)
else:
    raise SystemExit("obstore.put has replaced it, too")

memory = MemoryFileSystem()  # fsspec's own, for comparison
memory.pipe_file("/lock", b"first", mode="create")
try:
    memory.pipe_file("/lock", b"second", mode="create")
except FileExistsError as error:
    print("fsspec's MemoryFileSystem:", type(error).__name__)
else:
    raise SystemExit("fsspec's MemoryFileSystem has replaced it, too")
PY
"$folder/venv/bin/python" "$folder/run.py" "$folder"
