"""Rewards: built-in rules, and the processes that run any reward function."""
