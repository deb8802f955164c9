"""Lets all of MindSpore launch msops' kernels on a GPU, where these are faster than its own."""
