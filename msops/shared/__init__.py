"""Has parts of operators: what several of a family share, and what makes a file of its own."""
