"""What the Triton backend makes of real models, compiled for a GPU that need not be there: `make kernels`."""
