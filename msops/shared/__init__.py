"""Has what several operators of one family share."""
