"""Corrections of what PyTorch's operators do in a trace otherwise than in eager.

The table of functions is `corrections.py`; each row has the test that shows it is still needed.
"""
