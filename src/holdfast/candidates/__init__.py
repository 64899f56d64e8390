"""Candidates of a round: interpolation, target refit, logit bias, and every rule of choice."""
