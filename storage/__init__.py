"""What is kept: Arrow artifacts with manifests, a run's ledger, checkpoints. Imports no tensor or workflow library."""

from storage.artifacts import Artifact, read_table
from storage.durable import RunLocked, StorageError
from storage.ledger import Run, open_run
from storage.ragged import Ragged
from storage.run_writer import RunWriter
from storage.schema import build_table

__all__ = [
    "Artifact",
    "Ragged",
    "Run",
    "RunLocked",
    "RunWriter",
    "StorageError",
    "build_table",
    "open_run",
    "read_table",
]
