"""The only package that imports PyTorch's private modules; it covers torch 2.11 to 2.14.

A module for each part of PyTorch. What is imported from there says why, unless its name does. Heavy imports
stand inside small functions, so that `import aotdist` stays quick.
"""
