"""From a C entry to a MindSpore operator."""
