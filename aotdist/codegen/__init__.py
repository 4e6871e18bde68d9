"""Graph -> callable: see `contract.py` for what a backend is, `backend.py` for what names mean."""
