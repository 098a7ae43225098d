"""A real PostgreSQL on a loopback port, from the system's binaries; it has a folder of its own and can be killed."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from servers import free_port, wait_until

HOMES = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda path: int(path.parent.name))
USER = "grpoflow"


@dataclass
class Postgres:
    """A server with one role, which owns all databases.

    Attributes:
        folder: data, socket and log.
        port: on the loopback address.
        options: more words of the server's command line.
    """

    folder: Path
    port: int = field(default_factory=free_port)
    password: str = field(default_factory=lambda: secrets.token_hex(8))
    options: tuple[str, ...] = ()
    _server: subprocess.Popen[bytes] | None = None

    def url(self, database: str, driver: str = "psycopg2") -> str:
        """SQLAlchemy's URL of a database; the password comes from PGPASSWORD."""
        return f"postgresql+{driver}://{USER}@127.0.0.1:{self.port}/{database}"

    def make(self) -> None:
        """Make the data folder."""
        secret = self.folder / "password"
        secret.write_text(self.password)
        _give_away(self.folder)
        self._run("initdb", "-D", self._data, "-U", USER, "-A", "scram-sha-256", "--pwfile", str(secret), "-E", "UTF8")

    def start(self) -> None:
        """Start the server and wait until it answers."""
        words = ["-D", self._data, "-p", str(self.port), "-c", "listen_addresses=127.0.0.1", "-k", str(self.folder)]
        words += self.options
        with (self.folder / "log").open("ab") as log:
            self._server = subprocess.Popen(
                [*_as_nobody(), str(HOMES[-1] / "postgres"), *words], stdout=log, stderr=log
            )
        wait_until(lambda: self._answers(), 60)

    def kill(self) -> None:
        """Kill the server and its processes with -9."""
        if self._server is None:
            return
        lines = (Path(self._data) / "postmaster.pid").read_text().splitlines()
        os.kill(int(lines[0]), signal.SIGKILL)
        self._server.wait(30)
        self._server = None

    def stop(self) -> None:
        """End the server at once, in order."""
        if self._server is not None:
            self._server.send_signal(signal.SIGINT)
            self._server.wait(30)
            self._server = None

    def create(self, database: str) -> str:
        """Make a database; its URL."""
        self._run("createdb", "-h", "127.0.0.1", "-p", str(self.port), "-U", USER, database)
        return self.url(database)

    def ask(self, database: str, query: str) -> list[str]:
        """Lines that a query gives."""
        words = ("-h", "127.0.0.1", "-p", str(self.port), "-U", USER, "-d", database, "-At", "-c", query)
        return self._run("psql", *words).splitlines()

    def dump(self, database: str) -> Path:
        """Back a database up into a file."""
        path = self.folder / f"{database}.dump"
        self._run("pg_dump", *self._there, "-Fc", "-f", str(path), database)
        return path

    def drop(self, database: str) -> None:
        """Remove a database, whoever is connected to it."""
        self._run("dropdb", *self._there, "--force", database)

    def restore(self, path: Path, database: str) -> str:
        """Make a database from a backup; its URL."""
        url = self.create(database)
        self._run("pg_restore", *self._there, "--exit-on-error", "-d", database, str(path))
        return url

    @property
    def _there(self) -> tuple[str, ...]:
        return ("-h", "127.0.0.1", "-p", str(self.port), "-U", USER)

    def _answers(self) -> bool:
        words = ("-h", "127.0.0.1", "-p", str(self.port))
        return subprocess.run([HOMES[-1] / "pg_isready", *words], capture_output=True, check=False).returncode == 0

    @property
    def _data(self) -> str:
        return str(self.folder / "data")

    def _run(self, program: str, *words: str) -> str:
        environment = {**os.environ, "PGPASSWORD": self.password}
        command = [*_as_nobody(), str(HOMES[-1] / program), *words]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd="/", check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout


@contextmanager
def postgres() -> Iterator[Postgres]:
    """A running PostgreSQL, gone again afterwards; the test is skipped where the system has none."""
    if not HOMES:
        pytest.skip("no PostgreSQL in /usr/lib/postgresql: apt-get install postgresql")
    # Not in pytest's folder, which is closed to the user that PostgreSQL runs as.
    server = Postgres(Path(tempfile.mkdtemp(prefix="grpoflow-pg-")))
    try:
        server.make()
        server.start()
        yield server
    finally:
        server.stop()
        shutil.rmtree(server.folder, ignore_errors=True)


def _as_nobody() -> list[str]:
    """PostgreSQL refuses to run as root."""
    return ["setpriv", "--reuid=nobody", "--regid=nogroup", "--clear-groups"] if os.geteuid() == 0 else []


def _give_away(folder: Path) -> None:
    if os.geteuid() == 0:
        for path in (folder, *folder.iterdir()):
            shutil.chown(path, "nobody", "nogroup")
