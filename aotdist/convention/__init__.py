"""Layers that lower a calling convention to a simpler one; each leaves a plan that lifts it back."""
