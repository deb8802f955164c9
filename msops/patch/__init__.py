"""Puts operators that run on GPU and CPU in place of MindSpore's own, which run on Ascend alone."""
