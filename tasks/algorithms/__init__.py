"""The numbers: advantages, policy losses, KL, aggregation and rollout correction, each a small pure function."""
