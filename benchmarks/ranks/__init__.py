"""What each rank sees when the ranks differ, beside eager FSDP2: `make ranks` writes `docs/ranks.md`."""
