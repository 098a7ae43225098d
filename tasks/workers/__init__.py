"""The policy on its device: what owns the weights, computes log-probs and takes optimizer steps."""
