"""What runs on a GPU, beside `torch.compile` and the kernels that people use today: `make bench-gpu`."""
