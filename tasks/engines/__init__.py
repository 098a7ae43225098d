"""Rollout engines: what samples responses. One protocol, one module per engine."""
