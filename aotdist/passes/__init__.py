"""Graph -> Graph: named passes with one signature, run in the order that `order.py` lists."""
