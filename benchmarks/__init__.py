"""What aotdist costs and saves beside what people use today: `python -m benchmarks.run`.

Every number worth quoting is a ratio between contenders that took turns in the same processes (A, B,
C, A, B, C, ...), so that a machine that is busy or throttled slows all of them alike. Absolute times
are printed for orientation and never asserted.
"""
