"""Evaluation: models and examples in, tables of predictions out; measures are functions of those tables."""
