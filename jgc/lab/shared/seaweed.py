"""A real S3 server on this machine: SeaweedFS from PyPI (extra `rounds-test`)."""

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

from jgc.lab.chaos.processes import free_port
from jgc.training.errors import FAILED, UserError

BUCKET, KEY, SECRET = "runs", "key", "secret"
_PARTS = ("s3", "master", "volume", "filer")


def find_weed() -> Path | None:
    """SeaweedFS's program: next to this Python, or on the PATH."""
    program = shutil.which("weed", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")
    return Path(program) if program else None


class Seaweed:
    """A server with one empty bucket, "runs", whose data is in a folder. Also a context manager.

    Args:
      folder: an existing folder.

    Raises:
      UserError: SeaweedFS is not installed, or does not answer.
    """

    def __init__(self, folder: Path):
        self.program, self.folder = find_weed(), folder
        if self.program is None:
            raise UserError("there is no SeaweedFS here: pip install 'jgc[rounds-test]'")
        self.ports = {name: free_port() for part in _PARTS for name in (part, f"{part}.grpc")}
        keys = [{"accessKey": KEY, "secretKey": SECRET}]
        actions = ["Admin", "Read", "Write", "List", "Tagging"]
        identity = {"name": "jgc", "credentials": keys, "actions": actions}
        (folder / "s3.json").write_text(json.dumps({"identities": [identity]}))
        (folder / "data").mkdir(exist_ok=True)
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def port(self) -> int:
        """Where its S3 interface answers on 127.0.0.1."""
        return self.ports["s3"]

    def start(self) -> "Seaweed":
        """Start it, and wait until it has the bucket. Does nothing if it runs."""
        if self.process is None:
            argv = [
                str(self.program), "server", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-s3",
                f"-dir={self.folder / 'data'}", f"-s3.config={self.folder / 's3.json'}",
                "-volume.max=20", "-master.volumeSizeLimitMB=64",
                # on fixed ports otherwise, and a second server on this machine ends: findings/
                "-s3.port.iceberg=0", "-s3.port.lance=0",
            ]  # fmt: skip
            for name, port in self.ports.items():
                part, _, grpc = name.partition(".")
                argv.append(f"-{part}.port{'.grpc' if grpc else ''}={port}")
            with (self.folder / "weed.log").open("ab") as log:
                self.process = subprocess.Popen(argv, stdout=log, stderr=log)
            self._make_bucket()
        return self

    def stop(self) -> None:
        """Stop it; its data stays."""
        if self.process is not None:
            self.process.terminate()
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
            self.process = None

    def environment(self, port: int | None = None) -> dict[str, str]:
        """Environment variables for a process that is to use it, by a port in front of it if given."""
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port or self.port}", "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_REGION": "us-east-1", "AWS_ALLOW_HTTP": "true",
        }  # fmt: skip

    def _make_bucket(self, seconds: float = 90.0) -> None:
        """A folder of the filer's /buckets, once the server answers: no S3 client here makes buckets."""
        url = f"http://127.0.0.1:{self.ports['filer']}/buckets/{BUCKET}/"
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and self.process is not None and self.process.poll() is None:
            try:
                with contextlib.suppress(urllib.error.HTTPError):  # it exists
                    urllib.request.urlopen(urllib.request.Request(url, method="POST"), timeout=10).close()
                return socket.create_connection(("127.0.0.1", self.port), timeout=10).close()
            except OSError:
                time.sleep(0.3)
        self.stop()
        raise UserError(f"SeaweedFS does not answer; its log is {self.folder / 'weed.log'}", FAILED)

    def __enter__(self) -> "Seaweed":
        return self.start()

    def __exit__(self, *error: object) -> None:
        self.stop()
