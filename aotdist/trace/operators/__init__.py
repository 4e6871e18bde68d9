"""What PyTorch's operators do otherwise in a trace than in eager, and what is done about it.

The table of functions is `corrections.py`; each row has the test that shows it is still needed.
"""
