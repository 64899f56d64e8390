"""Corrections for several hypotheses, and the bound of the paper's Lemma 1."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np


def bonferroni(p_values: Sequence[float]) -> list[float]:
    """min(1, m p): valid for anything that is quoted side by side."""
    return [min(1.0, len(p_values) * p) for p in p_values]


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's adjusted p-values: valid whatever the dependence (tasks that share images)."""
    order = sorted(range(len(p_values)), key=lambda index: p_values[index])
    adjusted = [0.0] * len(p_values)
    running = 0.0
    for rank, index in enumerate(order):
        running = max(running, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = running
    return adjusted


def hommel(p_values: Sequence[float]) -> list[float]:
    """Hommel's adjusted p-values (closed testing with Simes): for tasks with disjoint, independent images.

    Wright (1992): with p_(1) <= ... <= p_(m), for each size i of an intersection c_i = min over j of i p_(m-i+j) / j.
    """
    m = len(p_values)
    order = np.argsort(np.asarray(p_values), kind="stable")
    p = np.asarray(p_values, dtype=np.float64)[order]
    adjusted = p.copy()
    ranks = np.arange(1, m + 1)
    for size in range(m, 1, -1):
        smallest = (size * p[m - size :] / ranks[:size]).min()
        adjusted[m - size :] = np.maximum(adjusted[m - size :], smallest)
        adjusted[: m - size] = np.maximum(adjusted[: m - size], np.minimum(smallest, size * p[: m - size]))
    result = np.empty(m)
    result[order] = np.minimum(adjusted, 1.0)
    return result.tolist()


def lemma_one_allowance(n: int, tasks: int, delta: float, complexity: float = 0.0, rate: float = 0.5) -> float:
    """4C / n^α + 2 sqrt(ln(2m/δ) / (2n)): what Lemma 1 of the paper adds to the empirical change of a loss in [0, 1].

    With probability 1-δ, for all m tasks at once and whatever the model: population change <= empirical change + this.
    C n^-α (α <= 1/2) bounds the Rademacher complexity of the loss class. No C is known for a network of today's size;
    C = 0 is the most favourable value there can be, and the bound is vacuous at common n even then.
    """
    return 4.0 * complexity / n**rate + 2.0 * math.sqrt(math.log(2.0 * tasks / delta) / (2.0 * n))
