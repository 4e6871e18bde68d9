"""Forty architectures of Hugging Face's transformers, each trained and asked to generate: `make zoo`."""
