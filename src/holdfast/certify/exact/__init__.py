"""The exact test of a paired difference: statistic, null line, acceptance region, power."""
