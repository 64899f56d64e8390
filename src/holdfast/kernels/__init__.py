"""Fast kernels: optional. Every one has a plain twin elsewhere; without this package the product works, slower."""
