"""Composes what `mindspore.mint` calls of operators that MindSpore has for GPU and CPU.

Each function takes the arguments of a call of the primitive that it replaces; see the table.
"""
