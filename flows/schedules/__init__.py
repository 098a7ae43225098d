"""Schedules: runs, sweeps and preflights that start at given times, as deployments of a Prefect server."""
