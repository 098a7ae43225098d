"""Sweeps: many runs over a space of configurations, stopped early where that pays, and a table at the end."""
