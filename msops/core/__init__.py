"""Turns a C entry into a MindSpore operator."""
