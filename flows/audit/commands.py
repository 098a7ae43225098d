"""The audit commands of the command line. Nothing heavy is imported until a command needs it."""

from __future__ import annotations

import typer

audit = typer.Typer()
