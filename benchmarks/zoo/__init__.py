"""Models as people have them, from Hugging Face's transformers, spread and compiled: `make models`."""
