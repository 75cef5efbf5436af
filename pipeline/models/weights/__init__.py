"""Read, write, name and transfer weights, as files and state dicts."""
