"""Models and data that recipes make themselves, so that they need no hub: what is computed, as functions of a seed."""
