"""Comparing methods: a study's jobs, the choice among them, and the paper's tables and figures."""
