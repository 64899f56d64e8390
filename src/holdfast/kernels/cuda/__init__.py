"""Kernels written in CUDA C++, compiled at run time, for Hopper."""
