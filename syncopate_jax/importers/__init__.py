"""Plans from other descriptions of a program, one source a file."""
