"""Speed and memory figures: each module prints medians and ratios of things run in turn in one process."""
